"""`headstart bench traffic`: what it counts, which requests it sends, how it tells steps apart. No figure is judged."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from headstart.benchmarks import floor
from headstart.benchmarks.engine import traffic
from headstart.benchmarks.shape import random_decoder
from headstart.evaluation.step_recorder import StepRecord, record_steps
from headstart.inference.llm import LLM
from headstart.kernels import jit

SMALL = [
    "--requests", "6", "--seats", "3", "--prompts", "5-70", "--outputs", "4-12", "--stalls", "9,20-70", "--stall-seats", "2",
    "--stall-requests", "5", "--first-prompt", "20",
]  # fmt: skip


@jit.jit
def scale(x):
    """A kernel without work."""


@jit.jit
def shift(x):
    """Another one."""


def recorded(*notes):
    """A StepRecord of (time in ms, prompt tokens) after each step."""
    record = StepRecord([])
    record.notes = [(ms / 1e3, 0, prompt_tokens, 2) for ms, prompt_tokens in notes]
    return record


def rounded(steps):
    return {kind: [round(ms, 6) for ms in samples] for kind, samples in steps.items()}


@pytest.fixture
def sent(monkeypatch):
    """The prompts and lengths of outputs of every measured call: of LLM.generate, and of record_steps."""
    calls = {"generate": [], "record_steps": []}

    def watch(name, call):
        def watched(where, prompts, params, **more):
            each = params if isinstance(params, list) else [params] * len(prompts)
            calls[name].append([(tuple(prompt), one.max_tokens) for prompt, one in zip(prompts, each)])
            return call(where, prompts, params, **more)

        return watched

    monkeypatch.setattr(traffic.LLM, "generate", watch("generate", LLM.generate))
    monkeypatch.setattr(traffic, "record_steps", watch("record_steps", record_steps))
    return calls


def test_both_tables_have_a_line_per_draft_and_every_draft_gets_the_same_requests(bench, sent):
    lines, found = bench("traffic", "--head", "mlp_speculator", "--acceptance", "2", *SMALL)
    drafts = ["plain", "mlp_speculator chain of 4"]
    assert [(row["draft"], row.get("prompt")) for row in found["rows"]] == [
        *((draft, None) for draft in drafts),
        *((draft, prompt) for draft in drafts for prompt in ("9", "20-70")),
    ]
    assert sum("output tokens/s" in line for line in lines) == 1
    assert sum("admitting p50 ms" in line for line in lines) == 1

    # Per draft: a warm-up, the requests, first tokens; then a warm-up before the stalls.
    each = 1 + 1 + traffic.FIRST_TOKENS
    plain, drafted = sent["generate"][:each], sent["generate"][each : 2 * each]
    assert plain == drafted
    requests = plain[1]
    assert len(requests) == 6
    assert all(5 <= len(prompt) <= 70 and 4 <= new <= 12 for prompt, new in requests)
    assert len({len(prompt) for prompt, _ in requests}) > 1
    assert [[len(prompt) for prompt, _ in call] for call in plain[2:]] == [[20]] * (each - 2)
    assert sent["record_steps"][:2] == sent["record_steps"][2:]
    assert [len(prompt) for prompt, _ in sent["record_steps"][0]] == [9] * 5
    mixed = [len(prompt) for prompt, _ in sent["record_steps"][1]]
    assert len(set(mixed)) > 1
    assert all(20 <= length <= 70 for length in mixed)

    for row in found["rows"][:2]:
        assert row["prompt_tokens"] == sum(len(prompt) for prompt, _ in requests)
        assert row["output_tokens"] == sum(new for _, new in requests)
        assert row["tokens_per_second"] == pytest.approx(row["output_tokens"] / row["seconds"], rel=1e-4)
        both = row["prompt_tokens"] + row["output_tokens"]
        assert row["all_tokens_per_second"] == pytest.approx(both / row["seconds"], rel=1e-4)
        parts = [row[f"floor_{part}"] for part in ("products", "keys", "drafts", "prompts")]
        assert row["floor"] == pytest.approx(sum(parts), rel=1e-4)
        assert row["over_floor"] == pytest.approx(row["seconds"] / row["floor"], rel=1e-4)
        assert row["preemptions"] == 0
    assert found["rows"][0]["tokens_per_step"] == 1
    assert 1 < found["rows"][1]["tokens_per_step"] < 3

    for row in found["rows"][2:]:
        assert row["admitting_steps"] == 3, "one for each prompt that entered the full batch of 2"
        assert row["launching_steps"] == 0, "on a CPU a step is read at once"
        for kind in ("plain", "admitting", "first"):
            assert 0 < row[f"{kind}_p50"] <= row[f"{kind}_p99"] <= row[f"{kind}_p999"]
        assert row["ratio_p50"] == pytest.approx(row["admitting_p50"] / row["plain_p50"], rel=1e-4)
    assert list(found["facts"]["first_token_ms"]) == drafts
    phases = ["warm-up", "throughput", "first token", "stalls 9", "stalls 20-70"]
    for draft in drafts:
        assert found["facts"]["kernels_after_startup"][draft] == {phase: {} for phase in phases}
    assert sum("kernels compiled after start-up: 0 in warm-up, 0 in throughput" in line for line in lines) == 2


def test_without_stalls_there_is_the_first_table_alone(bench):
    lines, found = bench("traffic", *SMALL, "--stalls", "none", "--stall-seats", "9")
    assert [row["draft"] for row in found["rows"]] == ["plain"]
    assert not any("admitting" in line for line in lines)


def test_prompts_that_fill_the_batch_do_not_count_as_entering(bench):
    # Six prompts of 380 tokens are computed in two steps.
    arguments = [*SMALL, "--stalls", "9,380", "--stall-seats", "6", "--stall-requests", "8"]
    _, found = bench("traffic", *arguments)
    assert [row["admitting_steps"] for row in found["rows"][1:]] == [2, 2]


def test_preemptions_are_those_of_the_measured_requests(bench, monkeypatch):
    counts = []

    class SmallCache(LLM):
        def __init__(self, *arguments, **options):
            pages = None if options.get("enforce_eager") else 4
            super().__init__(*arguments, **options, num_gpu_blocks_override=pages)

        def generate(self, *arguments):
            outputs = super().generate(*arguments)
            counts.append(self.engine.metrics.num_preemptions)
            return outputs

    monkeypatch.setattr(traffic, "LLM", SmallCache)
    monkeypatch.setattr(traffic, "WARM_OUTPUT", 30)
    arguments = ["--requests", "4", "--seats", "4", "--prompts", "60-60", "--outputs", "20-20", "--stalls", "none"]
    _, found = bench("traffic", *arguments, "--first-prompt", "9")
    assert 0 < counts[0] < counts[1]
    assert found["rows"][0]["preemptions"] == counts[1] - counts[0]


def test_percentiles_are_nearest_ranks():
    assert traffic.quantiles("x", range(1000, 0, -1)) == {"x_p50": 500, "x_p99": 990, "x_p999": 999}
    assert traffic.quantiles("x", range(1, 101)) == {"x_p50": 50, "x_p99": 99, "x_p999": 100}
    assert traffic.quantiles("x", [3, 1, 2]) == {"x_p50": 2, "x_p99": 3, "x_p999": 3}
    assert traffic.quantiles("x", [7]) == {"x_p50": 7, "x_p99": 7, "x_p999": 7}
    assert traffic.quantiles("x", []) == {}


def test_a_step_read_at_once_is_the_one_that_launched_its_prompt():
    # Two prompts of 10 fill the batch; one enters in the step to 15 ms, one in the step to 27 ms, none after it.
    record = recorded((5, 10), (9, 20), (10, 20), (15, 30), (16.5, 20 + 10), (18, 30), (27, 40), (28, 40))
    assert rounded(record.split(20, 0)) == {"plain": [1, 1.5, 1.5], "admitting": [5, 9], "launching": []}


def test_a_step_read_late_computed_the_prompt_of_the_launch_before():
    # The prompt launched in the step to 15 ms is computed in the step to 22 ms.
    record = recorded((5, 10), (9, 20), (10, 20), (11, 20), (15, 30), (22, 30), (23, 30), (24, 40), (34, 40), (35, 40))
    assert rounded(record.split(20, 1)) == {"plain": [1, 1], "admitting": [7, 10], "launching": [4, 1]}


def test_a_prompt_in_two_chunks_admits_in_both_steps():
    record = recorded((1, 10), (2, 20), (3, 20), (4, 20), (5, 28), (8, 30), (10, 30), (11, 30))
    assert rounded(record.split(20, 1)) == {"plain": [1], "admitting": [3, 2], "launching": [1]}


def test_a_batch_that_was_never_full_has_no_steps():
    assert recorded((1, 5), (2, 9)).split(20, 0) == {"plain": [], "admitting": [], "launching": []}


def test_prompts_enter_when_an_output_has_ended(shape):
    llm = LLM(traffic.config_of_shape(shape), load_format="dummy", dtype="float32", device="cpu", max_num_seqs=3)
    prompts, params = traffic.random_requests(128, 0, 7, (5, 9), (3, 8))
    most = []
    step = llm.engine.step

    def counted():
        most.append(len(llm.engine.scheduler.active) + len(llm.engine.scheduler.waiting))
        return step()

    llm.engine.step = counted
    record = record_steps(llm.session, prompts, params, at_once=2)
    assert most[0] == max(most) == 2, "with three seats"
    assert [len(one.requests[0].output_token_ids) for one in record.submissions] == [one.max_tokens for one in params]
    assert [one.prompt.token_ids for one in record.submissions] == prompts


@pytest.mark.parametrize("late", [0, 1])
def test_admitting_steps_are_those_that_hand_back_a_first_token(shape, late):
    llm = LLM(traffic.config_of_shape(shape), load_format="dummy", dtype="float32", device="cpu", max_num_seqs=2)
    llm.engine.steps_late = late
    step, first = llm.engine.step, []

    def watched():
        advanced = step()
        first.append(any(len(request.output_token_ids) == 1 for request in advanced))
        return advanced

    llm.engine.step = watched
    prompts, params = traffic.random_requests(128, 0, 6, (9, 9), (8, 14))
    record = record_steps(llm.session, prompts, params, at_once=2)
    between = [0, *((b[0] - a[0]) * 1e3 for a, b in itertools.pairwise(record.notes))]
    handed_back = [i for i, found in enumerate(first) if found]
    steps = record.split(2 * 9, late)
    assert handed_back[0] == late
    assert steps["admitting"] == [between[i] for i in handed_back[1:]]
    assert steps["launching"] == [between[i - 1] for i in handed_back[1:] if late and i - 1 not in handed_back]
    assert len(steps["plain"]) == handed_back[-1] - late - len(steps["admitting"]) - len(steps["launching"])


def test_floor_reads_weights_once_per_full_step_and_multiplies_every_prompt_token(shape):
    llm = LLM(traffic.config_of_shape(shape), load_format="dummy", dtype="float32", device="cpu")
    settings = traffic.TrafficSettings(shape, seats=2)
    bench = traffic.TrafficBench(settings, None, llm, bandwidth=1e6, rate=1e6)
    found = bench.floor([(10, 5), (20, 7), (30, 3)], [4, 6, 2], 1, None)
    hidden, inter, vocab = 32, 48, 128
    layer = (4 + 2 * 2) * 8 * hidden + 4 * 8 * hidden + 3 * hidden * inter + 2 * hidden
    layers, key_values = 2 * layer + hidden, 2 * 2 * 2 * 8 * 4
    context = 4 * 12.5 + 6 * 23.5 + 2 * 31.5
    weights = layers + vocab * hidden
    assert found["floor_products"] == pytest.approx(max(6 * 4 * weights, 2 * 12 * weights) / 1e6)
    assert found["floor_keys"] == pytest.approx(context * key_values / 1e6)
    assert found["floor_drafts"] == 0
    assert found["floor_prompts"] == pytest.approx(2 * (60 * layers + 3 * vocab * hidden) / 1e6)
    many = bench.floor([(10, 5), (20, 7), (30, 3)], [4, 6, 2], 3, None)
    assert many["floor_products"] == pytest.approx(2 * 3 * 12 * weights / 1e6), (
        "more rows than the weights' bytes are worth"
    )
    assert floor.weight_bytes(random_decoder(shape, "cpu", torch.float32, 128)) == 4 * (layers + vocab * hidden)


def test_floor_of_drafts_reads_the_head_in_every_step(shape):
    llm = LLM(traffic.config_of_shape(shape), load_format="dummy", dtype="float32", device="cpu")
    bench = traffic.TrafficBench(
        traffic.TrafficSettings(shape, num_speculative_tokens=3, seats=1), None, llm, bandwidth=1e6, rate=1e12
    )
    head = traffic.empty_head("eagle", llm.config, 3)
    parts = head.draft_bytes(llm.engine.decoder.lm_head.nbytes)
    per_step = parts["first"] + 2 * parts["level"] + parts["advance"]
    plain, drafted = (bench.floor([(10, 9)], [4], 4, one) for one in (None, {"model": head}))
    keys = drafted["floor_keys"] * head.draft_key_bytes(3) / floor.kv_bytes(llm.engine.decoder, 1, 1)
    assert keys > 0
    assert drafted["floor_drafts"] - plain["floor_drafts"] == pytest.approx(4 * per_step / 1e6 + keys)


def test_kernels_are_counted_by_name_and_the_hook_before_is_called_and_put_back(monkeypatch):
    runtime = pytest.importorskip("triton").knobs.runtime
    seen = []
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **details: seen.append(details["fn"].name))
    before = runtime.jit_post_compile_hook
    names = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion", "launch_cooperative_grid", "extern_libs")
    target, options = SimpleNamespace(), SimpleNamespace(**dict.fromkeys(names, 1))

    def compiled(kernel):
        """Triton's own way to a compiled kernel, without a device and a compiler."""
        kernel.device_caches = {0: ({}, {}, target, None, None)}
        kernel.ASTSource, kernel.compile = lambda *_: "source", lambda *_, **__: "binary"
        kernel._do_compile(("", ()), {}, 0, {}, options, {}, False)

    with traffic.prepared_kernels() as found:
        compiled(scale), compiled(shift), compiled(scale)
    assert found == {"scale": 2, "shift": 1}
    assert seen == ["scale", "shift", "scale"]
    assert runtime.jit_post_compile_hook is before
    compiled(shift)
    assert found.total() == 3


def test_no_kernels_without_triton(monkeypatch):
    monkeypatch.setattr(traffic, "triton", None)
    with traffic.prepared_kernels() as found:
        pass
    assert found == {}
