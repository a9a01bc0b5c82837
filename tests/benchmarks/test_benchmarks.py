"""The benchmarks on random weights, on the CPU with the references: what they print, write and refuse. No figure is judged."""

import json

import pytest
import torch
from transformers import LlamaConfig

from headstart.benchmarks import floor, library, random_heads
from headstart.benchmarks.engine.draft import parallel_chains
from headstart.benchmarks.ops.linear_sweep import cases_of
from headstart.benchmarks.ops.losses import KL_WEIGHT, torch_losses
from headstart.benchmarks.shape import config_of_shape, random_decoder, spread_tree
from headstart.cli import main
from headstart.evaluation import results, timing
from headstart.inference.models.draft_weights import draft_bytes
from headstart.inference.speculation.drafters.levels import Levels
from headstart.inference.speculation.tree import ROOT_ONLY, chain
from headstart.inference.speculation.verify import TreeTensors
from headstart.kernels.training.distill_loss import LOSSES, distill_loss
from headstart.kernels.training.target_law import target_law

CPU = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A folder with the config of a tiny Llama."""
    folder = tmp_path_factory.mktemp("shape")
    LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch):
    """The rates of copies and products from sizes that take no time."""
    monkeypatch.setitem(floor.COPIED_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(floor.SQUARE, "cpu", 64)


@pytest.fixture
def bench(shape, capsys):
    """Run `headstart bench` on the tiny shape.  -> (the lines before the object, the object)"""

    def run(what, *arguments):
        assert main(["bench", what, *arguments, "--shape", shape, *CPU]) == 0
        *lines, last = capsys.readouterr().out.strip().splitlines()
        return lines, json.loads(last)

    return run


def check_times(row):
    assert 0 < row["p20"] <= row["p50"] <= row["p80"]


def test_step_prints_a_line_per_size_and_the_parts_of_the_largest_tree(bench, tmp_path):
    output = tmp_path / "step.json"
    lines, found = bench(
        "step", "--rows", "1,6", "--context", "70", "--batch", "1,3", "--repeats", "3", "--baseline", "eager",
        "--output", str(output),
    )  # fmt: skip
    forwards = [row for row in found["rows"] if row["part"] == "forward"]
    assert [(row["batch"], row["rows"]) for row in forwards] == [(1, 1), (1, 6), (3, 1), (3, 6)]
    parts = [row["part"] for row in found["rows"] if (row["batch"], row["rows"]) == (3, 6)]
    assert parts == [
        "forward", "draft, own", "verify", "commit", "whole step, own", "draft, shared", "whole step, shared",
    ]  # fmt: skip
    for row in found["rows"]:
        check_times(row)
    for row in forwards:
        assert row["library"] > 0
        assert row["over_floor"] == pytest.approx(row["p50"] / row["floor"], rel=1e-3)
        assert sum(row["shares"].values()) == pytest.approx(1, abs=0.05)
    assert found["facts"]["weight_bytes"] > 0
    for key in ("date", "hardware", "torch", "triton", "commit", "command"):
        assert key in found
    assert json.loads(output.read_text()) == found
    table = [line for line in lines if line.split()[:3] == ["70", "3", "6"]]
    assert len(table) == len(parts)


def test_step_leaves_out_what_does_not_fit_with_a_note(bench, monkeypatch):
    monkeypatch.setattr("headstart.benchmarks.engine.step.plannable_bytes", lambda device: 100_000)
    lines, found = bench("step", "--rows", "1", "--context", "64,400", "--batch", "1", "--baseline", "none")
    assert any("context 400, batch 1: left out" in line for line in lines)
    assert [row["context"] for row in found["rows"]] == [64]


def test_floor_counts_every_weight_and_every_key_once(shape):
    decoder = random_decoder(shape, "cpu", torch.float32, 128)
    hidden, inter, vocab, heads, kv_heads, dim = 32, 48, 128, 4, 2, 8
    layer = (heads + 2 * kv_heads) * dim * hidden + heads * dim * hidden + 3 * hidden * inter + 2 * hidden
    assert floor.weight_bytes(decoder) == 4 * (2 * layer + hidden + vocab * hidden)
    assert floor.kv_bytes(decoder, 3, 10) == 3 * 10 * 2 * 2 * kv_heads * dim * 4


@pytest.mark.parametrize("tree", [ROOT_ONLY, chain(3), spread_tree(9)], ids=["root", "chain", "tree"])
def test_baseline_computes_what_the_engine_computes(shape, tree):
    """Greedy tokens of the baseline over dense keys equal those of the engine's pass over the same keys in pages."""
    from headstart.benchmarks.engine.step import StandingRequests, pages_needed
    from headstart.inference.engine.cache import PagedCache
    from headstart.inference.speculation.verify import strict

    torch.manual_seed(0)
    batch, context = 2, 70
    decoder = random_decoder(shape, "cpu", torch.float32, 128)
    nodes, hk, dim = tree.num_nodes, decoder.num_kv_heads, decoder.head_dim
    cache = PagedCache(pages_needed(batch, context, nodes), 2, hk, dim, torch.float32, torch.device("cpu"))
    cache.kv.normal_()
    standing = StandingRequests(decoder, cache, batch, context, tree, strict)
    keys = torch.zeros(2 * 2 * batch * hk * (context + nodes) * dim)
    step = library.LibraryStep(decoder, batch, context, TreeTensors(tree, "cpu"), keys, "eager")
    step.tokens = standing.tokens
    pages = cache.kv.view(2, 2, -1, hk, 64, dim)[:, :, standing.slots.block_table[:batch].long()]
    pages = pages.movedim(4, 3).reshape(2, 2, batch, hk, -1, dim)  # [layers, 2, B, HK, positions, D]
    step.kv[..., :context, :] = pages[..., :context, :]
    with torch.no_grad():
        assert torch.equal(standing.forward().view(batch, nodes), step())


@pytest.mark.parametrize(
    "op",
    [
        "linear", "gated_mlp", "attention", "rms_norm", "rotary", "embedding", "res_block", "sample", "verify", "commit",
        "distill-loss",
    ],
)  # fmt: skip
def test_kernel_times_every_operation(bench, op):
    _, found = bench("kernel", op, "--rows", "1,5", "--context", "70", "--repeats", "2")
    assert found["rows"]
    for row in found["rows"]:
        check_times(row)
        assert row["floor"] > 0
    assert {row["rows"] for row in found["rows"]} <= {1, 5}


@pytest.mark.parametrize("name", LOSSES)
def test_the_plain_losses_are_the_kernels(name):
    """What the benchmarks of training hold the kernel against says the same, gradients and all."""
    logits, target = torch.randn(2, 9, 31, generator=torch.Generator().manual_seed(0))
    labels, valid = torch.arange(9), torch.ones(9, dtype=torch.bool)
    z = logits.clone().requires_grad_()
    plain = torch_losses(z, labels, target.log_softmax(-1), name, KL_WEIGHT)
    (0.5 * plain).sum().backward()
    figures = distill_loss(logits, labels, valid, target_law(target), name, KL_WEIGHT, factor=0.5)
    torch.testing.assert_close(figures.loss, plain.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, z.grad, rtol=1e-4, atol=1e-6)


def test_kernel_distill_loss_has_every_loss_and_a_draft_vocabulary(bench, monkeypatch):
    monkeypatch.setattr("headstart.benchmarks.ops.losses.DRAFT_VOCABULARY", 40)
    _, found = bench("kernel", "distill-loss", "--rows", "3", "--repeats", "2")
    assert [(row["op"], row["what"]) for row in found["rows"]] == [
        ("target_law", "128"), *(("distill_loss", f"{name}, 128") for name in LOSSES),
        ("target_law", "40 of 128"), ("distill_loss", "kl, 40 of 128"),
    ]  # fmt: skip
    assert all(row["library"] > 0 for row in found["rows"])


def test_kernel_linear_sums_up_a_layer(bench):
    lines, found = bench("kernel", "linear", "--rows", "3", "--repeats", "2")
    assert any("a layer's four products at 3 rows" in line for line in lines)
    assert found["facts"]["layer_rate_of_library_at_3_rows"] > 0


def test_engine_accepts_at_the_asked_rates_and_shows_plain_decoding_beside(bench):
    _, found = bench(
        "engine", "--acceptance", "2.0", "--batch", "1,2", "--prompt-tokens", "20", "--new-tokens", "120", "--no-startup"
    )  # fmt: skip
    assert [(row["draft"], row["batch"]) for row in found["rows"]] == [
        ("plain", 1), ("plain", 2), ("medusa chain, own", 1), ("medusa chain, own", 2),
    ]  # fmt: skip
    for row in found["rows"]:
        check_times(row)
        assert row["tokens_per_second"] > 0
        assert row["of_graph"] > 0
    assert found["rows"][0]["tokens_per_step"] == 1
    assert found["rows"][3]["tokens_per_step"] == pytest.approx(2.0, abs=0.5)
    assert found["facts"]["first_token_ms"]["p50"] > 0


@pytest.mark.parametrize("head", ["mlp_speculator", "eagle", "eagle3"])
def test_engine_takes_a_head_of_every_method_and_as_deep_as_asked(bench, head, monkeypatch):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 40)
    _, found = bench(
        "engine", "--head", head, "--num-speculative-tokens", "5", "--acceptance", "5.5", "--batch", "2",
        "--prompt-tokens", "20", "--new-tokens", "120", "--no-startup",
    )  # fmt: skip
    assert [row["draft"] for row in found["rows"]] == ["plain", f"{head} chain"]
    assert found["rows"][1]["nodes"] == 6
    assert found["rows"][1]["tokens_per_step"] == pytest.approx(5.5, abs=0.5)  # out of reach of drafts 4 deep
    assert found["settings"]["head"] == head


def test_engine_chooses_its_own_depths_when_asked(bench):
    _, found = bench(
        "engine", "--head", "mlp_speculator", "--acceptance", "2.0", "--batch", "1", "--adaptive",
        "--prompt-tokens", "20", "--new-tokens", "120", "--no-startup",
    )  # fmt: skip
    plain, whole, chosen = found["rows"]
    assert [row["draft"] for row in found["rows"]] == [
        "plain",
        "mlp_speculator chain",
        "mlp_speculator chain, adaptive",
    ]
    assert (plain["depth"], whole["depth"]) == (0, 4)
    assert 0 < chosen["depth"] < 4, "every depth is tried"
    assert 1 < chosen["tokens_per_step"] < 3.5
    assert chosen["graph"] is None
    check_times(chosen)


def test_draft_prints_the_parts_that_a_head_has(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 40)
    output = tmp_path / "draft.json"
    lines, found = bench(
        "draft", "--batch", "1,2", "--depth", "3", "--context", "70", "--repeats", "1", "--output", str(output)
    )  # fmt: skip
    sequential = ["first level", "level", "chain of 3"]
    with_keys = [*sequential[:2], "after a step", *sequential[2:]]
    expected = {"eagle3": with_keys, "eagle": with_keys, "mlp_speculator": sequential, "medusa": sequential[2:]}
    assert [(row["head"], row["batch"], row["part"]) for row in found["rows"]] == [
        (head, batch, part) for head, parts in expected.items() for batch in (1, 2) for part in parts
    ]
    for row in found["rows"]:
        assert row["p20"] <= row["p50"] <= row["p80"]
        assert row["over_floor"] == pytest.approx(row["p50"] / row["floor"], rel=1e-3)
    assert json.loads(output.read_text()) == found
    assert sum(line.split()[:3] == ["eagle3", "2", "level"] for line in lines) == 1


def test_draft_shows_what_building_a_dynamic_tree_takes(bench):
    _, found = bench(
        "draft", "--head", "mlp_speculator", "--batch", "2", "--depth", "2", "--context", "9", "--repeats", "1",
        "--tree", "dynamic",
    )  # fmt: skip
    static, grown, building = found["rows"][3:]
    assert [row["part"] for row in found["rows"][3:]] == ["levels of 8 rows", "dynamic tree", "tree building"]
    assert building["p50"] == pytest.approx(grown["p50"] - static["p50"], rel=1e-2, abs=1e-3)
    assert building["floor"] is None


def test_a_level_is_what_the_chain_takes_beyond_the_first(bench):
    _, found = bench(
        "draft", "--head", "mlp_speculator", "--batch", "1", "--depth", "4", "--repeats", "2", "--context", "9"
    )
    first, level, chain_of_4 = (row["p50"] for row in found["rows"])
    assert first + 3 * level == pytest.approx(chain_of_4, rel=1e-3)


def test_draft_floor_counts_every_weight_of_a_part_once(shape, monkeypatch):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 40)
    config, decoder = config_of_shape(shape), random_decoder(shape, "cpu", torch.float32, 128)
    hidden, inter, vocab = 32, 48, 128
    rest = (4 * 8) * hidden + 3 * hidden * inter + hidden  # output product, MLP, the norm before it
    qkv = (4 + 2 * 2) * 8 * hidden
    block = hidden * hidden + hidden
    expected = {
        "eagle3": {
            "first": hidden + 40 * hidden,
            "level": 2 * qkv + rest + 2 * hidden + hidden + 40 * hidden,
            "advance": 3 * hidden * hidden + 2 * qkv + rest + 2 * hidden,
        },
        "eagle": {
            "first": vocab * hidden,
            "level": 2 * hidden * hidden + qkv + rest + vocab * hidden,
            "advance": 2 * hidden * hidden + qkv + rest,
        },
        "mlp_speculator": dict.fromkeys(("first", "level"), hidden * hidden + 2 * hidden + vocab * hidden),
        "medusa": {"first": 3 * (block + vocab * hidden)},
    }
    for method, parts in expected.items():
        head = random_heads.random_head(method, config, decoder, 3)
        assert draft_bytes(head, decoder.lm_head.nbytes) == {part: 4 * count for part, count in parts.items()}, method


def test_a_random_eagle3_head_drafts_tokens_spread_over_the_vocabulary(shape, monkeypatch):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 40)
    decoder = random_decoder(shape, "cpu", torch.float32, 128)
    head = random_heads.random_head("eagle3", config_of_shape(shape), decoder, 3)
    ids = head.draft_token_ids.tolist()
    assert len(set(ids)) == 40
    assert (min(ids), max(ids) // 4) == (0, 31)
    assert head.t2d.nonzero().flatten().tolist() == ids
    assert head.embed_tokens.weight.data_ptr() == decoder.embedding.data_ptr()


def test_the_static_twin_of_a_dynamic_tree_expands_as_many_nodes_and_asks_as_many_candidates():
    levels = Levels(TreeTensors(parallel_chains(3, 4), "cpu")).levels
    assert [(level.count, level.width) for level in levels] == [(1, 3), (3, 3), (3, 3), (3, 3)]


def test_engine_says_when_outputs_are_too_short_for_a_steady_state(bench):
    lines, found = bench(
        "engine", "--head", "none", "--batch", "1", "--prompt-tokens", "4", "--new-tokens", "6", "--no-startup"
    )
    assert found["rows"] == []
    assert any("plain, batch 1: left out, no steady state" in line for line in lines)


@pytest.mark.slow
def test_engine_measures_start_up_in_processes_of_their_own(bench):
    _, found = bench(
        "engine", "--head", "none", "--batch", "1", "--prompt-tokens", "4", "--new-tokens", "40"
    )  # fmt: skip
    for seconds in found["facts"]["startup"].values():
        assert 0 < seconds["imported"] < seconds["built"] < seconds["first_token"]


def test_peer_decodes_the_same_model_in_both_ways(bench):
    _, found = bench("peer", "--batch", "2", "--prompt-tokens", "9", "--new-tokens", "24")
    theirs, ours = found["rows"]
    assert (theirs["engine"], ours["engine"]) == ("transformers, static", "headstart")
    check_times(theirs)
    check_times(ours)
    assert ours["agreeing"] == 24  # fp32: no near-tie among these
    assert ours["speedup"] == pytest.approx(theirs["p50"] / ours["p50"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--shape", "llama-9"], "there is no shape 'llama-9'"),
        (
            ["step", "--shape", "SHAPE", "--rows", "1,x"],
            "--rows takes numbers separated by commas of at least 1, got '1,x'",
        ),
        (["step", "--shape", "SHAPE", "--rows", "65"], "num_nodes must be from 1 to 64"),
        (["step", "--shape", "SHAPE", "--context", "0"], "--context takes"),
        (["step", "--shape", "SHAPE", "--context", "64,512"], "--context 512 is beyond SHAPE: at most 511 fit"),
        (["step", "--shape", "SHAPE", "--lm-head", "its"], "--lm-head takes own, shared"),
        (["step", "--shape", "SHAPE", "--repeats", "0"], "--repeats must be at least 1"),
        (["step", "--shape", "SHAPE", "--dtype", "int4"], "--dtype must be auto or one of"),
        (["step", "--shape", "SHAPE", "--device", "warp"], "device must be auto, cpu, cuda or cuda:N, got 'warp'"),
        (["step", "--shape", "SHAPE", "--device", "cuda:99"], "device 'cuda:99' was asked for, but"),
        (["step", "--shape", "SHAPE", "--output", "/proc/x/y.json"], "cannot write /proc/x/y.json"),
        (["kernel", "softmax", "--shape", "SHAPE"], "there is no operation 'softmax'"),
        (["kernel", "linear", "--shape", "SHAPE", "--batch", "1,2"], "--batch takes one number"),
        (["kernel", "prefill-attention", "--shape", "SHAPE"], "prefill_attention runs on a GPU only"),
        (["kernel", "sample", "--shape", "SHAPE", "--sweep"], "--sweep is for linear"),
        (
            ["engine", "--shape", "SHAPE", "--acceptance", "9", "--prompt-tokens", "9"],
            "acceptance_length must be from 1 to 5",
        ),
        (["engine", "--shape", "SHAPE", "--prompt-tokens", "500", "--no-startup"], "beyond the shape's 512"),
        (["engine", "--shape", "SHAPE", "--head", "none", "--tree", "chain"], "--tree chain says how heads draft"),
        (["engine", "--shape", "SHAPE", "--head", "none", "--lm-head", "own"], "--lm-head own says how heads draft"),
        (["engine", "--shape", "SHAPE", "--head", "none", "--adaptive"], "--adaptive True says how heads draft"),
        (["engine", "--shape", "SHAPE", "--head", "none", "--acceptance", "2"], "--acceptance 2 says how heads draft"),
        (
            ["engine", "--shape", "SHAPE", "--head", "eagle", "--lm-head", "own"],
            "--lm-head own is for Medusa heads, and --head eagle is none",
        ),
        (
            ["engine", "--shape", "SHAPE", "--head", "eagle", "--tree", "static", "--prompt-tokens", "9"],
            "no static tree for eagle drafts of 4 tokens",
        ),
        (
            ["engine", "--shape", "SHAPE", "--head", "eagle", "--tree", "dynamic", "--prompt-tokens", "9"],
            "the verifier 'synthetic' accepts along the tree's deepest path",
        ),
        (
            ["engine", "--shape", "SHAPE", "--head", "none", "--num-speculative-tokens", "3"],
            "--num-speculative-tokens 3 says how heads draft",
        ),
        (
            ["draft", "--shape", "SHAPE", "--head", "eagle,eagel"],
            "--head takes some of medusa, mlp_speculator, eagle, eagle3",
        ),
        (["draft", "--shape", "SHAPE", "--depth", "1"], "--depth must be from 2 to 63, got 1"),
        (
            ["draft", "--shape", "SHAPE", "--depth", "8", "--tree", "dynamic"],
            "--depth of dynamic trees 8 wide must be from 2 to 7, got 8",
        ),
        (["draft", "--shape", "SHAPE", "--context", "512"], "--context 512 is beyond SHAPE: at most 511 fit"),
        (["peer", "--shape", "SHAPE", "--new-tokens", "3"], "--new-tokens must be at least 16"),
    ],
)
def test_bad_input_is_one_line_and_status_2(shape, arguments, message, capsys):
    filled = [{"SHAPE": shape}.get(word, word) for word in arguments]
    assert main(["bench", *filled, *(() if {"--device", "--dtype"} & set(filled) else CPU)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"headstart bench {arguments[0]}: error: ")
    assert message.replace("SHAPE", shape) in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "takes"),
    [
        (["step"], "the weights of llama-3-8b take 29.9 GiB in float32"),
        (["engine", "--head", "none", "--no-startup"], "the weights of llama-3-8b take 29.9 GiB"),
        (["engine", "--no-startup"], "the weights and the head of llama-3-8b take 38.0 GiB"),
        (["engine", "--lm-head", "shared", "--no-startup"], "the weights and the head of llama-3-8b take 30.2 GiB"),
        (["engine", "--head", "eagle3", "--no-startup"], "the weights and the head of llama-3-8b take 31.5 GiB"),
        (["draft", "--head", "medusa,eagle"], "the embedding, lm_head and a head of llama-3-8b take 14.8 GiB"),
        (["peer"], "the weights of llama-3-8b take 29.9 GiB"),
        (["kernel", "linear", "--rows", "1"], "the largest weights of llama-3-8b take 2.0 GiB"),
    ],
)
def test_a_shape_beyond_the_free_memory_is_refused_with_those_that_fit(arguments, takes, capsys, monkeypatch):
    free = {"kernel": 1, "draft": 10}.get(arguments[0], 26) << 30
    monkeypatch.setattr("headstart.benchmarks.shape.free_bytes", lambda device: free)
    assert main(["bench", *arguments, "--shape", "llama-3-8b", *CPU]) == 2
    printed = capsys.readouterr().err
    assert takes in printed
    assert f"and {free >> 30}.0 GiB are free on cpu" in printed
    fitting = printed.split("name a shape that fits (")[1].split(")")[0]
    if arguments[0] in ("kernel", "draft"):
        assert fitting == "llama-2-7b, mistral-7b"
    elif takes.startswith("the weights of"):
        assert fitting == "llama-3-8b-2layers, llama-2-7b"
    else:
        assert fitting.split(", ")[0] == "llama-3-8b-2layers"


def test_kernel_refuses_keys_beyond_the_free_memory(shape, capsys):
    arguments = [
        "kernel",
        "attention",
        "--shape",
        shape,
        *CPU,
        "--rows",
        "1",
        "--context",
        "64",
        "--batch",
        "1000000000",
    ]
    assert main(["bench", *arguments]) == 2
    assert "GiB are free on cpu: lower --batch, --context or --rows" in capsys.readouterr().err


def test_step_measures_the_usual_contexts_that_the_model_reaches(bench):
    _, found = bench("step", "--rows", "1", "--batch", "1", "--repeats", "1", "--baseline", "none")
    assert [row["context"] for row in found["rows"]] == [511]
    assert found["settings"]["contexts"] == [511]


def test_the_profiler_says_nothing_between_the_lines(shape, capfd):
    work = timing.Repeatable(lambda: torch.ones(9) + 1, "cpu")
    assert work.shares()
    assert capfd.readouterr().err == ""


def test_help_teaches_every_benchmark(capsys):
    assert main(["bench"]) == 0
    overview = capsys.readouterr().out
    for name in ("speculation", "step", "draft", "kernel", "engine", "peer", "train"):
        assert name in overview
        with pytest.raises(SystemExit) as end:
            main(["bench", name, "--help"])
        assert end.value.code == 0
        assert f"headstart bench {name}" in capsys.readouterr().out.split("example:")[1]


def test_percentiles_are_of_the_samples():
    assert timing.Times.of([5, 1, 4, 2, 3, 6]) == timing.Times(2, 3, 5)


def test_waiting_for_the_kernel_before_is_not_a_share_of_time():
    """b starts while a runs and waits for it; c starts after a gap; the second a is over before c ends."""
    found = timing.time_alone([("c", 30, 40), ("a", 0, 10), ("b", 4, 12), ("a", 31, 35)])
    assert found == {"a": 10, "b": 2, "c": 10}


def test_bare_output_name_is_dated_and_kept_with_the_results():
    path = results.result_path("step-h200")
    assert path.parent.parts == ("benchmarks", "results")
    assert path.name.endswith("-step-h200.json")
    assert results.result_path("here.json").name == "here.json"
    assert results.result_path("a/b").parts == ("a", "b")


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("_linear_kernel", "_linear_kernel"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)",
            "vectorized_elementwise_kernel",
        ),
        ("void (anonymous namespace)::softmax_warp<1>(float*)", "softmax_warp"),
    ],
)
def test_kernel_names_are_shortened(kernel, short):
    assert timing.short_name(kernel) == short


def test_the_sweep_tries_launches_for_every_product_rows_and_splits():
    cases = cases_of({"o": (512, 512), "gate_up": (1024, 512)}, (1, 80, 2048), torch.bfloat16)
    kinds = {(case.name, case.count, case.splits, type(case.launch).__name__) for case in cases}
    few = {("o", count, splits, "Launch") for count in (1, 80) for splits in (1, 2, 4)}
    many = {("o", 2048, splits, "PrefillLaunch") for splits in (1, 2, 4)} | {("gate_up", 2048, 1, "PrefillLaunch")}
    assert kinds == few | many | {("gate_up", 1, 1, "Launch"), ("gate_up", 80, 1, "Launch")}
    assert len(set(cases)) == len(cases) > 100


def test_every_verifier_has_a_line_with_and_without_filters(shape, capsys):
    assert main(["bench", "kernel", "rules", "--shape", shape, "--rows", "10", "--repeats", "1", *CPU]) == 0
    printed = capsys.readouterr().out
    for name, size in (("recursive", "1 x 10"), ("traversal", "1 x 10"), ("token", "2 x 5"), ("block", "2 x 5")):
        assert f"{name}, {size} " in printed
        assert f"{name}, {size}, cut " in printed
    assert printed.count("strict, ") == 4 * 2, "in the table and in the JSON"
