"""Drafts equal the head's predictions: the logits of every level are those of its training forward on the same text, and a
dynamic tree is the tree that grows from them."""

import pytest
import torch

from headstart.heads.eagle import Eagle
from headstart.heads.mlp_speculator import MLPSpeculator
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.kernels.sampling.philox import gumbel
from headstart.tests.inference.speculation.small_drafters import (
    ALONE,
    DEPTH,
    TEMPERATURES,
    VOCAB,
    llama,
    make,
    outputs,
    prompts_and_params,
)
from headstart.tests.kernels.speculation.test_dynamic_tree import grow_naively


class Watched:
    """Keeps the logits of every level that a drafter computes, and what it drafted."""

    def __init__(self, drafter):
        self.steps, self.levels, self.whole = [], [], drafter.whole
        self.start, self.expand, self.propose = drafter.start, drafter.expand, drafter.propose
        drafter.start, drafter.expand, drafter.propose = self._start, self._expand, self._propose

    def _start(self, batch):
        found = self.start(batch)
        self.levels = [self.whole(found[0])[0, 0].clone()]
        return found

    def _expand(self, *arguments):
        found = self.expand(*arguments)
        self.levels.append(self.whole(found[0])[0, 0].clone())
        return found

    def _propose(self, batch, tree, processor=None):
        drafted = self.propose(batch, tree, processor)
        self.steps.append((batch.committed.item(), drafted.tokens[0].tolist(), self.levels))
        return drafted


@pytest.mark.parametrize("name", ["mlp", "mlp-untied", "eagle", "eagle3", "eagle3-narrow"])
def test_the_engine_drafts_what_the_head_says_of_the_same_text(setting, name):
    """The training forward over the whole text, with the drafted tokens after the root, gives the logits of every level."""
    target, _ = setting
    head = make(name, target).to(target.device)
    speculative = {"model": head, "num_speculative_tokens": DEPTH}
    llm = LLM(target, max_num_seqs=1, enforce_eager=True, speculative_config=speculative)  # a graph cannot be watched
    watched = Watched(llm.engine.drafter)
    prompt = prompts_and_params(0.0)[0][1]
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].token_ids
    text, compared = prompt + output, 0
    for committed, drafted, levels in watched.steps:
        if text[: committed + 1][-1] != drafted[0] or committed + 1 > len(text):
            continue  # launched before its request was seen to have ended
        known = torch.tensor([text[:committed]], device=target.device)
        with torch.no_grad():
            expected = say(head, target, known, torch.tensor(drafted, device=target.device))
        for level, logits in zip(levels, expected):
            kept = level > -torch.inf
            assert kept.sum() == len(logits[logits > -torch.inf])
            error = (level[kept] - logits[kept]).abs().max()
            assert error < 1e-3 * logits[kept].abs().max()  # of random weights the states grow from layer to layer
            compared += 1
    assert compared >= 2 * DEPTH


def say(head, target, known, drafted):
    """Logits [V] of every step after the text `known` [1, L] and the tokens `drafted` [D + 1], by the training forward."""
    found = target.model(known, output_hidden_states=True)
    length, final = known.shape[1], found.last_hidden_state
    if isinstance(head, MLPSpeculator):
        return [x[0] for x in head(final[:, -1], drafted[None, :DEPTH])[0]]
    following = torch.cat((known[0, 1:], drafted))  # the token at t + 1, of every t
    positions, one = torch.arange(length, device=known.device)[None], torch.zeros_like(known)
    if isinstance(head, Eagle):
        # Its training forward is one step; unrolled on its own states, row by row, that is the text with the states as features.
        features, states = final, []
        for step in range(DEPTH):
            count = length + step
            at, document = (
                torch.arange(count, device=known.device)[None],
                torch.zeros(1, count, dtype=torch.long, device=known.device),
            )
            states.append(head(features, following[None, :count], at, document)[:, -1:])
            features = torch.cat((features, states[-1]), 1)
        return [target.lm_head(state)[0, 0] for state in states]
    streams = [found.hidden_states[i] for i in head.features if i < target.config.num_hidden_layers]
    if target.config.num_hidden_layers in head.features:
        kept = []
        hook = target.model.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        target.model(known)
        hook.remove()
        streams.append(kept[0])
    tokens = torch.stack([following[i : i + length] for i in range(DEPTH)], -1)[None]
    states = head(torch.cat(streams, -1), tokens, positions, one, DEPTH)
    logits = [head.logits(state)[0, -1] for state in states]
    if head.d2t is None:
        return logits
    return [x.new_full((VOCAB,), -torch.inf).index_copy(0, head.draft_token_ids, x) for x in logits]


class WatchedGrowth(Watched):
    """Keeps the distribution after every expanded path of tokens, and the tree of what was drafted."""

    def _start(self, batch):
        found = self.start(batch)
        self.rows, self.levels = [], {(): self.whole(found[0])[0, 0].clone()}
        return found

    def _expand(self, batch, level, tokens, state):
        found = self.expand(batch, level, tokens, state)
        self.rows += tokens[0].tolist()
        for way, logits in zip(level.ancestors[0].tolist(), self.whole(found[0])[:, 0]):
            self.levels[tuple(self.rows[row] for row in way)] = logits.clone()
        return found

    def _propose(self, batch, tree, processor=None):
        drafted = self.propose(batch, tree, processor)
        keys = batch.seed, batch.sample, batch.committed + 1
        self.steps.append((keys, drafted.tokens[0].tolist(), drafted.tree, self.levels))
        return drafted


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_dynamic_tree_is_the_one_that_heaps_grow_from_the_head_s_distributions(setting, tree_files, temperature):
    target, _ = setting
    head = make("eagle3", target).to(target.device)
    speculative = {"model": head, "tree": tree_files["dynamic"]}
    llm = LLM(target, max_num_seqs=1, enforce_eager=True, speculative_config=speculative)
    watched = WatchedGrowth(llm.engine.drafter)
    params = SamplingParams(seed=5, temperature=temperature, max_tokens=8)
    prompt, compared = prompts_and_params(0.0)[0][1], 0
    text = prompt + llm.generate(prompt, params)[0].outputs[0].token_ids

    def children(distributions, keys, path):
        distribution = distributions[path].double()
        if not temperature:
            found = distribution.log_softmax(0).topk(3)
            return list(zip(found.indices.tolist(), found.values.tolist()))
        seed, sample, position = keys
        found = (distribution / temperature + gumbel(seed, sample, position + len(path), VOCAB)[0]).topk(3)
        return list(zip(found.indices.tolist(), found.values.log_softmax(0).tolist()))

    for keys, tokens, grown, distributions in watched.steps:
        _, tree = grow_naively(
            lambda path, distributions=distributions, keys=keys: children(distributions, keys, path), 3, DEPTH, 14
        )
        paths = [()]
        for token, parent in zip(tokens[1:], grown.parents[0, 1:].tolist()):
            paths.append((*paths[parent], token))
        assert paths == [(), *tree]
        assert grown.depths[0].tolist() == [len(path) for path in paths]
        for path, ancestors in zip(paths, grown.ancestors[0].tolist()):
            assert [paths[node] for node in ancestors] == [path[:depth] for depth in range(DEPTH + 1)]
        committed = keys[2].item() - 1
        if text[: committed + 1][-1] != tokens[0] or committed + 1 > len(text):
            continue  # launched before its request was seen to have ended
        known = torch.tensor([text[:committed]], device=target.device)
        for path in (path for path in distributions if len(path) == DEPTH - 1):
            with torch.no_grad():
                expected = say(head, target, known, torch.tensor([tokens[0], *path, 0], device=target.device))
            for depth, logits in enumerate(expected):
                distribution, kept = distributions[path[:depth]], logits > -torch.inf
                assert torch.equal(distribution > -torch.inf, kept)
                assert (distribution[kept] - logits[kept]).abs().max() < 2e-4 * logits[kept].abs().max()
                compared += 1
    assert compared >= 3 * 3 * DEPTH


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_medusa_heads_draft_with_the_noise_of_the_places_they_draft_for(setting, tree_files, temperature):
    """Rank r after a node of depth k: the r-th of what head k says, under the noise that the target draws there with."""
    target, _ = setting
    head = make("medusa", target).to(target.device)
    speculative = {"model": head, "tree": tree_files["static"]}
    llm = LLM(target, max_num_seqs=1, enforce_eager=True, speculative_config=speculative)
    propose, compared = llm.engine.drafter.propose, []

    def compare(batch, tree, processor=None):
        drafted, tree = propose(batch, tree, processor), tree.tree
        for depth in range(tree.max_depth):
            scores = head.logits(batch.feature, depth, target.lm_head.weight)[0].double()
            if temperature:
                position = batch.committed + 1 + depth
                scores = scores / temperature + gumbel(batch.seed, batch.sample, position, VOCAB)[0]
            best = scores.argsort(descending=True).tolist()
            nodes = [node for node in range(tree.num_nodes) if tree.depths[node] == depth + 1]
            assert drafted.tokens[0, nodes].tolist() == [best[tree.ranks[node]] for node in nodes]
            compared.append(depth)
        return drafted

    llm.engine.drafter.propose = compare
    llm.generate([5, 6, 7], SamplingParams(seed=5, temperature=temperature, max_tokens=5))
    assert len(compared) >= DEPTH


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
@pytest.mark.parametrize(
    "params",
    [
        dict(top_k=3),
        dict(top_p=0.5, min_p=0.01),
        dict(allowed_token_ids=list(range(1, VOCAB, 5)), logit_bias={6: 2.0, 11: -2.0}),
        dict(min_tokens=5, stop_token_ids=list(range(0, VOCAB, 2))),
    ],
    ids=lambda params: next(iter(params)),
)
def test_drafts_follow_what_requests_ask_of_logits(setting, tree_files, params, tree):
    """The target as its own draft: drawn from the distribution that a request asks for, its first choices are right to the last
    one.
    """
    target, _ = setting
    asked = dict(temperature=0.8, count=ALONE, max_tokens=12) | params
    speculative = {"model": target, "num_speculative_tokens": DEPTH, "tree": tree_files[tree]}
    llm = LLM(target, speculative_config=speculative)
    found = outputs(llm, **asked)
    assert found == outputs(LLM(target), **asked)
    # All but the first token, by DEPTH + 1.
    fewest = sum(-(-(len(tokens) - 1) // (DEPTH + 1)) for tokens, _ in found)
    assert llm.get_stats()["num_spec_steps"] == fewest


@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_candidates_of_narrower_depths_are_filled_up(name):
    target = llama()
    llm = LLM(target, max_num_seqs=1, speculative_config={"model": make(name, target), "num_speculative_tokens": DEPTH})
    llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=1))
    batch = llm.engine.seats.gather(torch.tensor([0]), llm.engine.tree.depths)
    found = llm.engine.drafter.candidates(batch, [2, 4, 1])
    assert found.shape == (1, 3, 4)
    assert torch.equal(found, llm.engine.drafter.candidates(batch, [4, 4, 4]))
