"""Speculation changes no bit: outputs with drafts equal those of plain decoding, for every tree, batch and temperature.

The drafter here knows the plain outputs and proposes a mixture of right and wrong tokens, so that every length of accepted
path occurs; the target is a small random model, whose near-ties make it a strict judge.
"""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headstart.inference.engine as engine_module
from headstart.inference.llm import LLM
from headstart.inference.sampling import SamplingBatch, SamplingParams
from headstart.inference.tree import Tree, build_static_tree, chain
from headstart.inference.verify import TreeTensors
from headstart.kernels import tree_attention as attention_module

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


class KnowingDrafter:
    """Proposes the token of the known output with probability `rate`, at a random rank; everything else is wrong."""

    num_speculative_tokens = 8

    def __init__(self, known, rate=0.5, seed=0):
        self.known, self.rate, self.random = known, rate, random.Random(seed)
        self.requests = []

    def propose(self, root_tokens, feature, tree, temperature, noise):
        rows = []
        for request, root in zip(self.requests, root_tokens.tolist()):
            output = self.known[request.request_id]
            at = len(request.output_token_ids)
            tokens = [root]
            for node in range(1, tree.num_nodes):
                index = at + tree.tree.depths[node] - 1
                right = output[index] if index < len(output) else 0
                siblings = [tokens[m] for m in range(1, node) if tree.tree.parents[m] == tree.tree.parents[node]]
                wrong = self.random.randrange(VOCAB)
                token = right if self.random.random() < self.rate and right not in siblings else wrong
                while token in siblings:
                    token = self.random.randrange(VOCAB)
                tokens.append(token)
            rows.append(tokens)
        return torch.tensor(rows), []


def give_drafter(llm, tree, known, rate=0.5):
    """Put a KnowingDrafter with this tree into an LLM that was built plain."""
    drafter = KnowingDrafter(known, rate)
    engine = llm.engine
    engine.drafter, engine.tree = drafter, TreeTensors(tree, "cpu")
    engine.scheduler.tree_slots = tree.num_nodes
    engine.cache = engine_module_cache(engine, tree)
    decode = engine._decode

    def decode_and_tell(requests):
        drafter.requests = requests
        decode(requests)

    engine._decode = decode_and_tell
    return llm


def engine_module_cache(engine, tree):
    from headstart.inference.cache import PagedCache

    decoder, old = engine.decoder, engine.cache
    pages = old.num_pages + 2 * engine.scheduler.max_num_seqs
    engine.scheduler.free_pages = list(range(pages, 0, -1))
    engine.scheduler.num_pages = pages
    return PagedCache(len(decoder.layers), pages, decoder.num_kv_heads, decoder.head_dim, decoder.dtype, decoder.device)


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


def run(llm, prompts, params):
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def plain(target):
    """Plain outputs, one request at a time, per temperature."""
    prompts, found = prompts_of_lengths(LENGTHS), {}
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=70, seed=11, logprobs=3)
        found[temperature] = run(LLM(target, max_num_seqs=1), prompts, params)
    return prompts, found


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", TREES)
def test_speculation_changes_no_token_and_no_logprob(target, plain, name, temperature, batch):
    prompts, found = plain
    known = {(i, 0): tokens for i, (tokens, _) in enumerate(found[temperature])}
    llm = give_drafter(LLM(target, max_num_seqs=batch), TREES[name], known)
    params = SamplingParams(temperature=temperature, max_tokens=70, seed=11, logprobs=3)
    outputs = run(llm, prompts, params)
    assert [tokens for tokens, _ in outputs] == [tokens for tokens, _ in found[temperature]]
    assert [logprobs for _, logprobs in outputs] == [logprobs for _, logprobs in found[temperature]]
    accepted = llm.engine.metrics.spec_decode.accepted_per_position
    assert all(count > 0 for count in accepted), f"every depth must have been accepted at times: {accepted}"
    assert len(llm.engine.scheduler.free_pages) == llm.engine.scheduler.num_pages


def test_plain_outputs_do_not_depend_on_the_batch(target, plain):
    prompts, found = plain
    params = SamplingParams(temperature=0.8, max_tokens=70, seed=11, logprobs=3)
    order = list(range(len(prompts)))
    random.Random(3).shuffle(order)
    outputs = run(LLM(target, max_num_seqs=5), [prompts[i] for i in order], params)
    assert outputs == [found[0.8][i] for i in order]


def test_bfloat16_outputs_are_equal_too(plain):
    target = make_target(seed=4).to(torch.bfloat16)
    prompts = plain[0][:6]
    params = SamplingParams(temperature=0.8, max_tokens=50, seed=2, logprobs=1)
    alone = run(LLM(target, max_num_seqs=1), prompts, params)
    known = {(i, 0): tokens for i, (tokens, _) in enumerate(alone)}
    assert run(give_drafter(LLM(target, max_num_seqs=6), RAGGED, known), prompts, params) == alone


def test_trees_are_cut_where_max_model_len_ends(target):
    prompts = prompts_of_lengths([70, 75])
    alone = run(LLM(target, max_model_len=96), prompts, SamplingParams(temperature=0.0, max_tokens=None))
    known = {(i, 0): tokens for i, (tokens, _) in enumerate(alone)}
    llm = give_drafter(LLM(target, max_model_len=96), RAGGED, known, rate=1.0)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=None))
    assert [out.outputs[0].token_ids for out in outputs] == [tokens for tokens, _ in alone]
    assert [len(p) + len(o.outputs[0].token_ids) for p, o in zip(prompts, outputs)] == [96, 96]
    assert all(out.outputs[0].finish_reason == "length" for out in outputs)


# --- negative controls: each of these defects must break the equality above ---


def outputs_differ(target, plain, tree, temperature=0.0):
    prompts, found = plain
    known = {(i, 0): tokens for i, (tokens, _) in enumerate(found[temperature])}
    llm = give_drafter(LLM(target, max_num_seqs=4), tree, known)
    params = SamplingParams(temperature=temperature, max_tokens=70, seed=11, logprobs=3)
    return run(llm, prompts, params) != found[temperature]


def test_equality_breaks_if_accepted_kv_is_not_moved(target, plain, monkeypatch):
    monkeypatch.setattr(engine_module, "kv_commit", lambda *arguments: None)
    assert outputs_differ(target, plain, RAGGED)


def test_equality_breaks_if_siblings_keys_are_visible(target, plain, monkeypatch):
    build = attention_module.build_tree_index

    def all_earlier_nodes(block_table, committed, host, depths, ancestors, *rest):
        # Every node sees the nodes written before it, as if the tree were a chain.
        count = depths.shape[0]
        order = torch.arange(count)
        return build(block_table, committed, host, order, order.expand(count, -1), *rest)

    monkeypatch.setattr(engine_module, "build_tree_index", all_earlier_nodes)
    assert outputs_differ(target, plain, RAGGED)


def test_equality_breaks_if_noise_is_not_keyed_by_position(target, plain, monkeypatch):
    noise = SamplingBatch.noise

    def by_step(self, positions, vocab_size):
        # Keyed by the place in the step instead of the place in the sequence.
        return noise(self, torch.arange(positions.shape[1]).expand_as(positions), vocab_size)

    monkeypatch.setattr(SamplingBatch, "noise", by_step)
    alone = run(
        LLM(target, max_num_seqs=1), plain[0], SamplingParams(temperature=0.8, max_tokens=70, seed=11, logprobs=3)
    )
    assert outputs_differ(target, (plain[0], {0.8: alone}), chain(5), temperature=0.8)


def test_equality_breaks_if_rows_are_not_computed_in_fixed_blocks(target, plain, monkeypatch):
    import headstart.inference.decoder as decoder_module
    from headstart.kernels.linear import linear_reference

    monkeypatch.setattr(decoder_module, "linear", linear_reference)
    alone = run(
        LLM(target, max_num_seqs=1), plain[0], SamplingParams(temperature=0.0, max_tokens=70, seed=11, logprobs=3)
    )
    assert outputs_differ(target, (plain[0], {0.0: alone}), RAGGED)
