"""Speculation changes no bit: outputs with drafts equal those of plain decoding, for every tree, batch and temperature.

The drafter here knows the plain outputs and proposes a mixture of right and wrong tokens, so that every length of accepted
path occurs; the target is a small random model, whose near-ties make equality a strict test.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headstart.inference.engine.engine as engine_module
import headstart.inference.engine.launched as launched_module
import headstart.inference.engine.step as step_module
import headstart.inference.engine.target_scores as scores_module
from headstart.inference.engine.engine import Engine
from headstart.inference.engine.logprobs import TokenLogprobs
from headstart.inference.engine.request import Request
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.drafters.oracle import OracleDrafter
from headstart.inference.speculation.speculation import Speculation
from headstart.inference.speculation.tree import Tree, build_static_tree, chain
from headstart.kernels.attention import tree_attention as attention_module

VOCAB = 97


def make_target(seed=0, **changes):
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCAB,
    )
    config = LlamaConfig(**(shape | dict(max_position_embeddings=512, initializer_range=0.3) | changes))
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model


def speculating(target, tree, known, prompts, rate=0.5, **options):
    """An LLM on `target` whose drafter knows the outputs: request i (seed i) drafts from known[i]."""
    llm = LLM(target, **options)
    decoder = llm.engine.decoder
    drafter = OracleDrafter(known, [len(p) for p in prompts], rate, decoder.vocab_size, decoder.device)
    llm.session.engine = Engine.build(decoder, llm.eos_token_ids, llm.engine.options, Speculation(drafter, tree))
    return llm


def seeded(count, **params):
    """Parameters per prompt: the oracle knows request i by its seed."""
    return [SamplingParams(seed=i, **params) for i in range(count)]


def prompts_of_lengths(lengths, seed=1):
    generator = random.Random(seed)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in lengths]


RAGGED = build_static_tree([[0.6, 0.3, 0.2, 0.1], [0.5, 0.3, 0.1], [0.5, 0.2], [0.4, 0.2], [0.4]], 24)
TREES = {
    "chain-1": chain(1),
    "chain-5": chain(5),
    "ragged-24": RAGGED,
    "wide-64": build_static_tree([[0.3] * 10, [0.2] * 8, [0.2] * 8, [0.1] * 4], 64),
    "late-siblings": Tree((-1, 0, 0, 0, 3, 3, 5, 6), (0, 0, 1, 2, 0, 1, 0, 0)),
}
# Lengths below, at and across tiles (16), pages and prefill chunks (64).
LENGTHS = (1, 15, 16, 17, 40, 63, 64, 65, 100, 130)


def run(llm, prompts, **params):
    outputs = llm.generate(prompts, seeded(len(prompts), **params))
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


def tokens_of(found):
    return [tokens for tokens, _ in found]


@pytest.fixture(scope="module")
def target():
    return make_target()


LONG = dict(max_tokens=30, logprobs=3)


@pytest.fixture(scope="module")
def plain(target):
    """Plain outputs, one request at a time, per temperature."""
    prompts = prompts_of_lengths(LENGTHS)
    one = LLM(target, max_num_seqs=1, enable_prefix_caching=False)
    return prompts, {t: run(one, prompts, temperature=t, **LONG) for t in (0.0, 0.8)}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", TREES)
def test_speculation_changes_no_token_and_no_logprob(target, plain, name, temperature, batch):
    prompts, found = plain
    llm = speculating(target, TREES[name], tokens_of(found[temperature]), prompts, 0.6, max_num_seqs=batch)
    outputs = run(llm, prompts, temperature=temperature, **LONG)
    assert tokens_of(outputs) == tokens_of(found[temperature])
    assert outputs == found[temperature]
    accepted = llm.engine.metrics.spec_decode.accepted_per_position
    assert all(count > 0 for count in accepted), f"every depth must have been accepted at times: {accepted}"
    llm.engine.check()
    assert llm.engine.num_free_pages == llm.engine.scheduler.num_pages


def test_plain_outputs_do_not_depend_on_the_batch(target, plain):
    prompts, found = plain
    order = list(range(len(prompts)))
    random.Random(3).shuffle(order)
    llm = LLM(target, max_num_seqs=5)
    params = seeded(len(prompts), temperature=0.8, **LONG)
    outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs] == [found[0.8][i] for i in order]


@pytest.mark.parametrize("speculation", [False, True])
def test_preemption_changes_no_bit(target, plain, speculation):
    prompts, found = plain
    # Alone every request fits, all together need about three times the pages.
    options = dict(max_num_seqs=8, num_gpu_blocks_override=9)
    if speculation:
        llm = speculating(target, RAGGED, tokens_of(found[0.8]), prompts, **options)
    else:
        llm = LLM(target, **options)
    assert run(llm, prompts, temperature=0.8, **LONG) == found[0.8]
    assert llm.get_stats()["num_preemptions"] > 0
    llm.engine.check()


@pytest.fixture
def clock(monkeypatch):
    """clock(): from then on the engine's `time` advances only on request, by what a test adds to `now`."""

    def start():
        clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
        for module in (engine_module, launched_module):
            monkeypatch.setattr(module, "time", clock)
        return clock

    return start


@pytest.fixture
def timed(clock, target):
    """timed(**options) -> an LLM whose passes of the target take one second each, and nothing else any time."""

    def make(**options):
        llm, time = LLM(target, **options), clock()
        forward = llm.engine.decoder.forward

        def passing(*arguments):
            time.now += 1
            return forward(*arguments)

        llm.engine.decoder.forward = passing
        return llm

    return make


def test_reading_late_changes_no_bit(target, plain, clock):
    """As on a GPU: a step is launched before the previous one is read, while requests end, are preempted and cancelled."""
    prompts, found = plain
    stops = [tokens[25] for tokens, _ in found[0.8][-2:]]
    params = seeded(len(prompts), temperature=0.8, stop_token_ids=stops, **LONG)
    expected = [o.outputs[0].token_ids for o in LLM(target, max_num_seqs=1).generate(prompts, params)]
    assert len({len(tokens) for tokens in expected}) > 3, "requests must end at different places"
    llm = speculating(target, RAGGED, tokens_of(found[0.8]), prompts, max_num_seqs=6, num_gpu_blocks_override=9)
    llm.engine.steps_late = 1
    step = llm.engine.step

    def checked_step():
        advanced = step()
        llm.engine.check()
        return advanced

    llm.engine.step = checked_step
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
    assert llm.get_stats()["num_preemptions"] > 0
    # What was launched for requests that have ended does not count as time, however late the next call comes.
    stopped = next(i for i, tokens in enumerate(expected) if len(tokens) < LONG["max_tokens"])
    llm.generate([prompts[stopped]], [params[stopped]])
    assert llm.engine.launched, "a step was launched before the stop token was read"
    time = clock()
    llm.generate([prompts[stopped]], [params[stopped]])
    assert llm.engine.launched
    before = llm.get_stats()
    time.now += 1000
    llm.generate([prompts[stopped]], [params[stopped]])
    after = llm.get_stats()
    assert [after[name] - before[name] for name in ("prefill_seconds", "decode_seconds")] == [0, 0]
    doomed = llm.session.submit(prompts[3], params[3]).requests[0]
    for _ in range(4):
        llm.engine.step()
    llm.engine.cancel(doomed)
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
    llm.engine.check()
    assert llm.engine.num_free_pages == llm.engine.scheduler.num_pages


def test_an_interrupt_while_reading_loses_no_token(target, plain, monkeypatch):
    prompts, found = plain
    llm = LLM(target, max_num_seqs=2)
    llm.engine.steps_late = 1
    params = seeded(2, temperature=0.8, **LONG)
    stream = llm.session.submit(prompts[1], params[1]).requests[0]
    hand_back, calls = llm.engine._hand_back, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return hand_back(*arguments)

    monkeypatch.setattr(llm.engine, "_hand_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompts[0]], params[:1])
    for _ in range(200):
        llm.engine.step()
    assert stream.output_token_ids == found[0.8][1][0]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("where", ["advance", "draw_first", "hand_over", "_hand_back", "run", "append", "extend"])
def test_an_error_in_a_step_changes_nothing_for_others(target, plain, raising, where, late):
    """Wherever it comes, in a prefill or a decode, and half-way through handing tokens back."""
    prompts, found = plain
    llm = LLM(target, max_num_seqs=3, speculative_config={"model": target, "num_speculative_tokens": 3})
    llm.engine.steps_late = late
    params = seeded(3, temperature=0.8, **LONG)
    other = llm.session.submit(prompts[1], params[1]).requests[0]
    engine = llm.engine
    owners = {"advance": engine.drafter, "run": engine.graphs, "draw_first": engine.prompts, "append": Request}
    owners |= {"extend": TokenLogprobs, "hand_over": engine_module}
    owner = owners.get(where, llm.engine)
    for place in range(1, 7):
        with raising(owner, where, place):
            try:
                llm.generate([prompts[0]], params[:1])
            except MemoryError:
                pass
            else:
                assert where == "draw_first"  # which is called once for each request
        llm.engine.check()
    while not other.finished:
        llm.engine.step()
    assert (other.output_token_ids, other.logprobs.entries()) == found[0.8][1]
    # And the pages left in the prefix cache hold the content of their names.
    assert run(llm, [prompts[0]], temperature=0.8, **LONG) == found[0.8][:1]
    llm.engine.check()


def test_prompt_time_is_counted_chunk_by_chunk(timed):
    llm = timed(max_num_batched_tokens=16)
    llm.generate([[5] * 400], SamplingParams(max_tokens=1))
    assert llm.get_stats()["prefill_seconds"] == 25


def test_prompts_and_steps_are_timed_apart(timed):
    llm = timed()
    llm.engine.steps_late = 0
    llm.generate([[5] * 40], SamplingParams(temperature=0.0, max_tokens=4))
    taken = llm.get_stats()
    assert (taken["prefill_seconds"], taken["decode_seconds"]) == (1, 3)


def test_prefix_reuse_changes_no_bit(target, plain):
    prompts, found = plain
    llm = LLM(target, max_num_seqs=4)
    assert run(llm, prompts, temperature=0.8, **LONG) == found[0.8]
    computed = llm.get_stats()["num_prompt_tokens"]
    assert run(llm, prompts, temperature=0.8, **LONG) == found[0.8]
    again = llm.get_stats()["num_prompt_tokens"] - computed
    assert again == computed - 64 * sum((len(p) - 1) // 64 for p in prompts)


def test_filters_change_no_bit(target, plain):
    prompts = plain[0][:6]
    filters = dict(temperature=0.9, top_k=40, top_p=0.95, max_tokens=30, logprobs=1)
    alone = LLM(target, max_num_seqs=1)
    found = run(alone, prompts, **filters)
    # Stop tokens: for one request a token that occurs late and ends it, for the next a token that occurs early and is forbidden.
    stops = [tokens[5 if i % 2 else 25] for i, (tokens, _) in enumerate(found)]
    filters |= dict(min_tokens=12, stop_token_ids=stops[:2])
    expected = run(alone, prompts, **filters)
    assert any(len(tokens) < 30 for tokens, _ in expected)
    assert all(len(tokens) >= 12 for tokens, _ in expected)
    llm = speculating(target, RAGGED, tokens_of(expected), prompts, max_num_seqs=6)
    llm.engine.steps_late = 1
    assert run(llm, prompts, **filters) == expected


def test_chunked_prefill_changes_no_bit(target, plain):
    prompts, found = plain
    llm = LLM(target, max_num_seqs=8, max_num_batched_tokens=23)
    assert run(llm, prompts, temperature=0.8, **LONG) == found[0.8]


@pytest.mark.parametrize("head_dim", [6, 10])
@pytest.mark.parametrize("tree", ["chain-5", "ragged-24"])
def test_odd_sizes_change_no_bit(tree, head_dim):
    target = make_target(seed=5, hidden_size=6 * head_dim, head_dim=head_dim, intermediate_size=77)
    prompts = prompts_of_lengths((1, 17, 40, 65))
    alone = run(LLM(target, max_num_seqs=1, enable_prefix_caching=False), prompts, temperature=0.8, **LONG)
    llm = speculating(target, TREES[tree], tokens_of(alone), prompts, max_num_seqs=4)
    assert run(llm, prompts, temperature=0.8, **LONG) == alone


def test_bfloat16_outputs_are_equal_too(plain):
    target = make_target(seed=4).to(torch.bfloat16)
    prompts = plain[0][:6]
    alone = run(LLM(target, max_num_seqs=1), prompts, temperature=0.8, max_tokens=30, logprobs=1)
    llm = speculating(target, RAGGED, tokens_of(alone), prompts, max_num_seqs=6)
    assert run(llm, prompts, temperature=0.8, max_tokens=30, logprobs=1) == alone


def test_trees_are_cut_where_max_model_len_ends(target):
    prompts = prompts_of_lengths([70, 75])
    alone = run(LLM(target, max_model_len=96), prompts, temperature=0.0, max_tokens=None)
    llm = speculating(target, RAGGED, tokens_of(alone), prompts, rate=1.0, max_model_len=96)
    outputs = llm.generate(prompts, seeded(2, temperature=0.0, max_tokens=None))
    assert [out.outputs[0].token_ids for out in outputs] == tokens_of(alone)
    assert [len(p) + len(o.outputs[0].token_ids) for p, o in zip(prompts, outputs)] == [96, 96]
    assert all(out.outputs[0].finish_reason == "length" for out in outputs)


# --- negative controls: each of these defects must break the equality above ---


def outputs_differ(target, plain, tree, temperature=0.0):
    prompts, found = plain
    llm = speculating(target, tree, tokens_of(found[temperature]), prompts, max_num_seqs=4)
    return run(llm, prompts, temperature=temperature, **LONG) != found[temperature]


def plain_again(target, plain, temperature):
    """The plain outputs with a defect in place."""
    llm = LLM(target, max_num_seqs=1, enable_prefix_caching=False)
    return plain[0], {temperature: run(llm, plain[0], temperature=temperature, **LONG)}


def test_equality_breaks_if_accepted_kv_is_not_moved(target, plain, monkeypatch):
    monkeypatch.setattr(step_module, "kv_commit", lambda *arguments: None)
    assert outputs_differ(target, plain, RAGGED)


def test_equality_breaks_if_siblings_keys_are_visible(target, plain, monkeypatch):
    build = attention_module.build_tree_index

    def all_earlier_nodes(block_table, committed, depths, ancestors, *rest, **named):
        # Every node sees the nodes written before it, as if the tree were a chain.
        count = depths.shape[0]
        order = torch.arange(count)
        return build(block_table, committed, order, order.expand(count, -1), *rest, **named)

    monkeypatch.setattr(step_module, "build_tree_index", all_earlier_nodes)
    assert outputs_differ(target, plain, RAGGED)


def test_equality_breaks_if_noise_is_not_keyed_by_position(target, plain, monkeypatch):
    sample = scores_module.sample_tokens

    def by_place(logits, temperature, seed, sample_index, position):
        # Keyed by the row in the step instead of the place in the sequence.
        return sample(logits, temperature, seed, sample_index, torch.arange(len(position)) % 7)

    monkeypatch.setattr(scores_module, "sample_tokens", by_place)
    assert outputs_differ(target, plain_again(target, plain, 0.8), chain(5), temperature=0.8)


def test_equality_breaks_if_rows_are_not_computed_in_fixed_blocks(target, plain, monkeypatch):
    import headstart.inference.models.blocks as blocks_module
    from headstart.kernels.linear.linear import linear_reference

    monkeypatch.setattr(blocks_module, "linear_parts", lambda x, w, b=None, **_: linear_reference(x, w, b)[None])
    assert outputs_differ(target, plain_again(target, plain, 0.0), RAGGED)
