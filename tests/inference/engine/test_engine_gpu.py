"""The engine on a GPU: speculation changes no bit there either, and the host never waits for the device in steady state.

benchmarks/proofs/equality.py and benchmarks/proofs/long_run.py are the same checks over a million tokens and more.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import headstart.inference.engine.engine as engine_module
import headstart.inference.engine.logprobs as logprobs_module
import headstart.inference.engine.step as step_module
import headstart.inference.models.blocks as blocks_module
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.inference.engine.engine import Engine
from headstart.inference.engine.options import EngineOptions
from headstart.inference.engine.prompt_passes import KnownRows
from headstart.inference.engine.target_scores import CUT
from headstart.inference.llm import LLM
from headstart.inference.models.shapes import config_of
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.drafters.oracle import OracleDrafter
from headstart.inference.speculation.speculation import Speculation
from headstart.inference.speculation.tree import build_static_tree, chain
from headstart.kernels.attention import tree_attention as attention_module
from headstart.kernels.linear.linear import decode_parts, linear_reference

pytestmark = pytest.mark.gpu

RAGGED = build_static_tree([[0.6, 0.3, 0.2, 0.1], [0.5, 0.3, 0.1], [0.5, 0.2], [0.4, 0.2], [0.4]], 24)
LENGTHS = (1, 15, 63, 64, 65, 128, 200, 255, 256, 257, 300, 511)


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def wide(request):
    """Two layers as wide as an 8B Llama-3, random."""
    config = config_of("llama-3-8b-2layers")
    return LLM(config, load_format="dummy", dtype=request.param, max_model_len=1024, max_num_seqs=16)


def make_prompts(vocab_size):
    generator = random.Random(0)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


def run(llm, prompts, **params):
    params = [SamplingParams(seed=i, ignore_eos=True, **params) for i in range(len(prompts))]
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)]


def speculating(llm, prompts, plain, tree, batch, **options):
    decoder = llm.engine.decoder
    known = [tokens for tokens, _ in plain]
    drafter = OracleDrafter(known, [len(p) for p in prompts], 0.6, decoder.vocab_size, decoder.device)
    other = LLM(llm, max_model_len=llm.max_model_len, max_num_seqs=1, num_gpu_blocks_override=32, enforce_eager=True)
    options = EngineOptions(llm.max_model_len, max_num_seqs=batch, **options)
    other.session.engine = Engine.build(decoder, llm.eos_token_ids, options, Speculation(drafter, tree))
    return other


LONG = dict(max_tokens=80, logprobs=2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_bit(wide, temperature):
    prompts = make_prompts(wide.engine.decoder.vocab_size)
    alone = LLM(wide, max_model_len=1024, max_num_seqs=1, enable_prefix_caching=False)
    plain = run(alone, prompts, temperature=temperature, **LONG)
    assert run(wide, prompts, temperature=temperature, **LONG) == plain, "plain decoding in a batch"
    for tree in (chain(4), RAGGED):
        for batch in (1, 16):
            llm = speculating(wide, prompts, plain, tree, batch)
            assert run(llm, prompts, temperature=temperature, **LONG) == plain, (tree.num_nodes, batch)
            accepted = llm.engine.metrics.spec_decode.accepted_per_position
            assert all(accepted), f"every depth must have been accepted at times: {accepted}"
    pressed = speculating(wide, prompts, plain, RAGGED, 16, num_gpu_blocks_override=40, max_num_batched_tokens=100)
    assert run(pressed, prompts, temperature=temperature, **LONG) == plain, "chunked and preempted"
    assert pressed.engine.scheduler.num_preemptions > 0
    pressed.engine.check()
    eager = LLM(wide, max_model_len=1024, enforce_eager=True)
    assert run(eager, prompts[:4], temperature=temperature, **LONG) == plain[:4], "without graphs"


def score_prompts(llm, prompts):
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, ignore_eos=True)
    return [output.prompt_logprobs for output in llm.generate(prompts, params)]


def test_prompt_logprobs_are_equal_however_the_prompt_was_computed(wide, monkeypatch):
    prompts = make_prompts(wide.engine.decoder.vocab_size)
    alone = LLM(wide, max_model_len=1024, max_num_seqs=1)
    found = score_prompts(alone, prompts)
    assert [len(one) for one in found] == list(LENGTHS)
    assert score_prompts(alone, prompts) == found, "with cached prefixes"
    assert score_prompts(wide, prompts) == found, "in a batch"
    for output, expected in zip(prompts[-3:], run(alone, prompts[-3:], temperature=0.8, **LONG)):
        (again,) = score_prompts(alone, [output + expected[0]])
        assert again[len(output) :] == expected[1], "decoding scored the same tokens"
    monkeypatch.setattr(logprobs_module, "SCORED_ROWS", 37)
    chunked = LLM(wide, max_model_len=1024, max_num_batched_tokens=100)
    assert score_prompts(chunked, prompts) == found, "in chunks, in other slices"


def test_processed_logprobs_keep_the_equality(wide):
    """Requests with and without filters in one batch: the scores of a row are computed in two ways."""
    prompts = make_prompts(wide.engine.decoder.vocab_size)[:8]

    def mixed(llm):
        shared = dict(max_tokens=40, logprobs=2, ignore_eos=True)
        distributions = (dict(temperature=0.0), dict(temperature=0.7), dict(temperature=0.9, top_k=40, top_p=0.9))
        params = [SamplingParams(seed=i, **shared, **distributions[i % 3]) for i in range(len(prompts))]
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)]

    mode = dict(logprobs_mode="processed_logprobs")
    plain = mixed(LLM(wide, max_model_len=1024, max_num_seqs=1, **mode))
    assert mixed(LLM(wide, max_model_len=1024, max_num_seqs=8, **mode)) == plain
    assert mixed(speculating(wide, prompts, plain, RAGGED, 8, **mode)) == plain
    for i, ((_, raw), (_, processed)) in enumerate(zip(mixed(wide), plain)):
        pairs = [(a[t].logprob, b[t].logprob) for a, b in zip(raw, processed) for t in a.keys() & b.keys()]
        near = max(abs(a - b) for a, b in pairs) < 1e-4  # the normaliser of 16-bit logits is added in another order
        assert near == (i % 3 == 0), i


def test_filters_keep_the_equality(wide):
    prompts = make_prompts(wide.engine.decoder.vocab_size)[:6]
    filters = dict(temperature=0.9, top_k=40, top_p=0.9, max_tokens=40, logprobs=1)
    alone = LLM(wide, max_model_len=1024, max_num_seqs=1)
    found = run(alone, prompts, **filters)
    # Stop tokens: for one request a token that occurs late and ends it, for the next a token that occurs early and is forbidden.
    stops = [tokens[5 if i % 2 else 25] for i, (tokens, _) in enumerate(found)]
    filters |= dict(min_tokens=12, stop_token_ids=stops)
    plain = run(alone, prompts, **filters)
    assert any(len(tokens) < 40 for tokens, _ in plain)
    assert all(len(tokens) >= 12 for tokens, _ in plain)
    assert run(speculating(wide, prompts, plain, RAGGED, 8), prompts, **filters) == plain


def test_parameters_keep_the_equality_also_when_their_tables_come_late(wide):
    prompts = make_prompts(wide.engine.decoder.vocab_size)[:6]
    given = [
        dict(top_k=50),
        dict(logit_bias={5: 3, 7: -2}, min_p=0.01),
        dict(presence_penalty=-1, frequency_penalty=-0.3),
        dict(repetition_penalty=0.7),
        dict(allowed_token_ids=list(range(0, 4000, 3)), min_tokens=9, stop_token_ids=[3, 6]),
        {},
    ]

    def parameters(count):
        common = dict(temperature=0.8, max_tokens=40, logprobs=1, ignore_eos=True)
        return [SamplingParams(seed=i, **(common | (own if i < count else {}))) for i, own in enumerate(given)]

    def outputs(llm, params):
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)]

    alone = LLM(wide, max_model_len=1024, max_num_seqs=1)
    plain = {count: outputs(alone, parameters(count)) for count in range(1, 6)}
    assert outputs(LLM(wide, max_model_len=1024, enforce_eager=True), parameters(5)) == plain[5]
    llm = speculating(wide, prompts, plain[5], RAGGED, 8)
    # Every round needs another table, whose address the graphs of the previous round do not have.
    for count in range(1, 6):
        assert outputs(llm, parameters(count)) == plain[count], count
    pressed = speculating(wide, prompts, plain[5], RAGGED, 6, num_gpu_blocks_override=20)
    assert outputs(pressed, parameters(5)) == plain[5]


@pytest.mark.parametrize("shared_lm_head", [False, True])
def test_medusa_heads_change_no_bit(wide, shared_lm_head):
    decoder = wide.engine.decoder
    shape = dict(hidden_size=decoder.hidden_size, vocab_size=decoder.vocab_size, num_heads=3, num_layers=2)
    with torch.device("cuda"):
        head = Medusa(MedusaConfig(shared_lm_head=shared_lm_head, **shape)).to(decoder.dtype).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    prompts = make_prompts(decoder.vocab_size)[:6]
    plain = run(LLM(wide, max_model_len=1024), prompts, temperature=0.8, max_tokens=30)
    llm = LLM(wide, max_model_len=1024, speculative_config={"model": head})
    assert run(llm, prompts, temperature=0.8, max_tokens=30) == plain
    # The drafts are those of the module's own forward.
    feature = torch.randn(5, decoder.hidden_size, device="cuda", dtype=decoder.dtype)
    found = llm.engine.drafter.logits(feature, 3).double()
    exact = head.double()
    weight = decoder.lm_head.double() if shared_lm_head else None
    for k in range(3):
        expected = exact.logits(feature.double(), k, weight)
        assert (found[k] - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("own", [{}, dict(frequency_penalty=0.1, logit_bias={3: 1}, min_p=0.01)])
def test_two_hundred_steps_never_wait_for_the_device(wide, own):
    llm = speculating(wide, [[1, 2, 3]] * 8, [([5] * 400, None)] * 8, RAGGED, 8)
    shared = dict(temperature=0.5, max_tokens=900, ignore_eos=True, **own)
    params = [SamplingParams(seed=i, logprobs=2 if i % 2 else None, **shared) for i in range(8)]
    for one in params:
        checked = replace(llm.session.check([1, 2, 3], one), bad_words=((5, 6), (7, 8, 9)) if own else ())
        llm.session.submit(checked)
    for _ in range(5):
        llm.engine.step()
    before = llm.engine.metrics.num_decode_passes
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert llm.engine.metrics.num_decode_passes - before == 200
    for request in list(llm.engine.scheduler.active):
        llm.engine.cancel(request)


def test_cancelled_requests_leave_no_trace(wide):
    prompts = make_prompts(wide.engine.decoder.vocab_size)
    plain = run(LLM(wide, max_model_len=1024, max_num_seqs=1), prompts[:3], temperature=0.7, max_tokens=40)
    llm = speculating(wide, prompts[:3], plain, chain(4), 4)
    kept, doomed = [], []
    for i in range(3):
        params = SamplingParams(seed=i, temperature=0.7, max_tokens=40, ignore_eos=True)
        kept += llm.session.submit(prompts[i], params).requests
        doomed += llm.session.submit(prompts[3 + i], SamplingParams(seed=1, max_tokens=200)).requests
    for number in range(200):
        llm.engine.step()
        if number in (1, 4, 7):
            llm.engine.cancel(doomed[(number - 1) // 3])
        if all(request.finished for request in kept):
            break
    assert [request.output_token_ids for request in kept] == [tokens for tokens, _ in plain]
    assert [request.finish_reason for request in doomed] == ["abort"] * 3
    llm.engine.check()
    assert llm.engine.num_free_pages == llm.engine.scheduler.num_pages


@pytest.mark.parametrize("where", ["run", "hand_over", "_hand_back"])
def test_an_error_in_a_step_changes_nothing_for_others(wide, raising, where):
    """With steps in flight when it comes, whose tokens nobody reads any more."""
    prompts = make_prompts(wide.engine.decoder.vocab_size)[:4]
    params = [SamplingParams(seed=i, temperature=0.8, ignore_eos=True, **LONG) for i in range(4)]
    plain = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in wide.generate(prompts, params)]
    llm = speculating(wide, prompts, plain, chain(4), 4)
    other = llm.session.submit(prompts[1], params[1]).requests[0]
    owner = {"run": llm.engine.graphs, "hand_over": engine_module}.get(where, llm.engine)
    for place in (2, 5):
        with raising(owner, where, place), pytest.raises(MemoryError):
            llm.generate([prompts[0]], params[:1])
    while not other.finished:
        llm.engine.step()
    assert (other.output_token_ids, other.logprobs.entries()) == plain[1]
    assert [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)] == plain
    llm.engine.check()


def test_threads_with_streams_of_their_own_share_the_batch(wide):
    """A step waits for the last one, whichever thread launched it and on which stream."""
    prompts = make_prompts(wide.engine.decoder.vocab_size)[:8]
    params = [SamplingParams(seed=i, temperature=0.8, ignore_eos=True, **LONG) for i in range(8)]
    expected = [wide.generate([prompt], one)[0].outputs[0] for prompt, one in zip(prompts, params)]

    def ask(place):
        with torch.cuda.stream(torch.cuda.Stream()):
            return wide.generate([prompts[place]], params[place])[0].outputs[0]

    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(8)))
        assert [(one.token_ids, one.logprobs) for one in found] == [(one.token_ids, one.logprobs) for one in expected]
    wide.engine.check()


def test_a_context_of_less_than_a_page_runs(wide):
    short = LLM(wide, max_model_len=32, max_num_seqs=2)
    long = LLM(wide, max_model_len=1024, max_num_seqs=2)
    for params in (dict(temperature=0.0), dict(temperature=0.8)):
        (found,), (expected,) = (run(llm, [[1, 2, 3]], max_tokens=20, **params) for llm in (short, long))
        assert found == expected


def test_too_little_memory_says_what_would_fit(wide):
    with pytest.raises(ValueError, match=r"max_model_len \d+"):
        LLM(wide, max_model_len=1024, max_num_seqs=4, gpu_memory_utilization=0.001)


# --- negative controls: each of these defects must break the equality above ---


@pytest.fixture
def outputs_differ(wide):
    prompts = make_prompts(wide.engine.decoder.vocab_size)

    def differ():
        """Whether plain decoding (with the defect) and speculation (with it, too) disagree anywhere."""
        alone = LLM(wide, max_model_len=1024, max_num_seqs=1, enable_prefix_caching=False)
        plain = run(alone, prompts, temperature=0.0, **LONG)
        return run(speculating(wide, prompts, plain, RAGGED, 8), prompts, temperature=0.0, **LONG) != plain

    return differ


def test_equality_breaks_with_a_library_product(outputs_differ, monkeypatch):
    monkeypatch.setattr(blocks_module, "linear_parts", lambda x, w, b=None, **_: linear_reference(x, w, b)[None])
    assert outputs_differ()


def test_equality_breaks_if_the_split_depends_on_the_rows(outputs_differ, monkeypatch):
    parts = blocks_module.linear_parts

    def by_rows(x, w, b=None, **_):
        return parts(x, w, b) if x.shape[0] <= 8 else decode_parts(x.contiguous(), w, b, splits=4)

    monkeypatch.setattr(blocks_module, "linear_parts", by_rows)
    assert outputs_differ()


def test_equality_breaks_if_siblings_keys_are_visible(outputs_differ, monkeypatch):
    build = attention_module.build_tree_index

    def all_earlier_nodes(block_table, committed, depths, ancestors, *rest, **named):
        order = torch.arange(depths.shape[-1], device=depths.device)
        return build(block_table, committed, order, order.expand(len(order), -1).contiguous(), *rest, **named)

    monkeypatch.setattr(step_module, "build_tree_index", all_earlier_nodes)
    assert outputs_differ()


def test_equality_breaks_if_accepted_kv_is_not_moved(outputs_differ, monkeypatch):
    monkeypatch.setattr(step_module, "kv_commit", lambda *arguments: None)
    assert outputs_differ()


@pytest.fixture(params=[{}, {"top_p": 0.9}], ids=["temperature", "top_p"])
def entering(wide, request, monkeypatch):
    """Prompts that enter a batch of four while others decode: outputs alone, and a function that gives them of the batch."""
    if request.param:
        build = Engine.build.__func__
        monkeypatch.setattr(
            Engine, "build", classmethod(lambda cls, *args, **more: build(cls, *args, **more | {"filters": CUT}))
        )
    prompts = make_prompts(wide.engine.decoder.vocab_size) * 2
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=10 + 7 * (i % 5), ignore_eos=True, **request.param)
        for i in range(len(prompts))
    ]

    def tokens(llm):
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    expected = tokens(LLM(wide, max_model_len=1024, max_num_seqs=1, enable_prefix_caching=False))

    def together(tree=None):
        # Prompts of 257, 300 and 511 tokens are cut.
        given = dict(max_num_batched_tokens=256, enable_prefix_caching=False)
        if tree is None:
            llm = LLM(wide, max_model_len=1024, max_num_seqs=4, **given)
        else:
            llm = speculating(wide, prompts, [(each, None) for each in expected], tree, 4, **given)
        sizes, run_graph = [], llm.engine.graphs.run

        def noted(seats, filters, which=0, known=None):
            sizes.append(known and known.size)
            return run_graph(seats, filters, which, known)

        llm.engine.graphs.run = noted
        found = tokens(llm)
        llm.engine.check()
        return found, sizes

    return expected, together


@pytest.mark.parametrize("tree", [None, chain(4), RAGGED], ids=["plain", "chain", "tree"])
def test_prompts_beside_running_requests_change_no_bit(entering, tree):
    expected, together = entering
    found, sizes = together(tree)
    assert found == expected
    assert len({size for size in sizes if size}) > 1, f"prompts of several sizes ride along: {sizes}"


@pytest.mark.parametrize("entering", [{}], indirect=True, ids=["temperature"])
@pytest.mark.parametrize(
    "fault", ["a key too many", "a key too few", "tokens not written", "a token written over another"]
)
def test_equality_breaks_if_known_rows_are_wrong(entering, monkeypatch, fault):
    forward_pass = KnownRows.forward_pass

    def wrong(self, num_kv_heads, part=0):
        given = forward_pass(self, num_kv_heads, part)
        if fault.startswith("a key"):
            shifted = given.attention.starts + (1 if fault == "a key too many" else -1)
            return replace(given, attention=replace(given.attention, starts=shifted.clamp(min=0)))
        places = given.cache_rows.clone()
        if fault == "tokens not written":
            places[3::4] = 0
        else:
            places[3] = places[2]
        return replace(given, cache_rows=places)

    monkeypatch.setattr(KnownRows, "forward_pass", wrong)
    expected, together = entering
    assert together()[0] != expected
