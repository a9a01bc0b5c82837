"""Drafts of Medusa heads for the ratio rules: every node's children equal draw_children on that node's distribution and noise."""

from types import SimpleNamespace

import pytest
import torch

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.inference.speculation.drafters.medusa import MedusaDrafter
from headstart.inference.speculation.tree import Tree, chain
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.kernels.sampling.keep_top import keep_top, kept_scores
from headstart.kernels.sampling.philox import DRAFT_NOISE, gumbel, salted
from headstart.tests.inference.speculation.draw_children import draw_children

VOCAB, HIDDEN, BATCH = 23, 8, 40
TREES = [chain(3), Tree((-1, 0, 0, 0, 1, 1, 2, 4, 4, 4), (0, 0, 1, 2, 0, 1, 0, 0, 1, 2))]


def batch_rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(BATCH)
    return SimpleNamespace(
        feature=torch.randn(BATCH, HIDDEN, generator=generator),
        root=rows % VOCAB,
        temperature=torch.where(rows % 4 == 3, 0.0, 0.4 + torch.rand(BATCH, generator=generator)),
        top_k=torch.tensor([0, 2, 0, 5])[rows % 4],
        top_p=torch.tensor([1.0, 1.0, 0.6, 1.0])[rows % 4],
        min_p=torch.tensor([0.0, 0.05, 0.0, 0.0])[rows % 4],
        seed=torch.randint(2**62, (BATCH,), generator=generator),
        sample=rows % 3,
        committed=rows + 5,
    )


def drafter(drawing):
    torch.manual_seed(0)
    head = Medusa(MedusaConfig(num_heads=3, hidden_size=HIDDEN, vocab_size=VOCAB, shared_lm_head=False))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    decoder = SimpleNamespace(lm_head=torch.zeros(VOCAB, HIDDEN))
    return MedusaDrafter(head.requires_grad_(False), decoder, sampling=drawing)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("drawing", ["sampled", "top_and_one", "greedy"])
@pytest.mark.parametrize("number", range(len(TREES)))
def test_every_node_draws_its_children_from_the_distribution_of_its_depth(number, drawing, filtered):
    tree, batch, medusa = TREES[number], batch_rows(), drafter(drawing)
    cut = batch.temperature, batch.top_k, batch.top_p, batch.min_p

    def shape(logits, depths):
        scores = kept_scores(keep_top(logits.flatten(0, 1), *(x.repeat(len(logits)) for x in cut)))
        return scores.view(logits.shape), (batch.temperature > 0).float(), None

    found = medusa.propose(batch, TreeOnDevice.of(tree, "cpu"), shape if filtered else None)
    logits = medusa.logits(batch.feature, tree.max_depth)
    heat = torch.where(batch.temperature > 0, batch.temperature, 1)[:, None]
    assert torch.equal(found.tokens[:, 0], batch.root)
    for n in sorted(set(tree.parents[1:])):
        children = [c for c in range(1, tree.num_nodes) if tree.parents[c] == n]
        log_q = logits[tree.depths[n]] / heat
        if filtered:
            log_q = kept_scores(keep_top(logits[tree.depths[n]], *cut))
        noise = gumbel(batch.seed, batch.sample, batch.committed, VOCAB, salted(DRAFT_NOISE, n))
        noise = None if drawing == "greedy" else noise * (batch.temperature > 0)[:, None]
        expected = draw_children(log_q, len(children), drawing, noise)
        if drawing == "greedy":  # without chance an empty slot may hold any token: the target never emits it
            expected = torch.where(expected < 0, found.tokens[:, children], expected)
        assert torch.equal(found.tokens[:, children], expected)
        of_distribution = (
            found.scores[found.distribution[n]] / torch.where(found.temperature > 0, found.temperature, 1)[:, None]
        )
        assert torch.allclose(of_distribution.softmax(-1), log_q.softmax(-1), atol=1e-6)
        assert (
            found.sampled[children].tolist()
            == {
                "sampled": [True] * len(children),
                "top_and_one": [False] * (len(children) - 1) + [True],
                "greedy": [False] * len(children),
            }[drawing]
        )
    assert (found.tokens < 0).any() == (filtered and drawing != "greedy" and not tree.is_chain)


def test_nodes_that_share_a_distribution_draw_different_children_and_the_next_step_draws_anew():
    tree, medusa = TreeOnDevice.of(TREES[1], "cpu"), drafter("sampled")
    batch = batch_rows()
    tokens = medusa.propose(batch, tree).tokens[batch.temperature > 0]
    assert (tokens[:, 4] != tokens[:, 6]).float().mean() > 0.2  # first children of two nodes of depth 1
    batch.committed += 1
    again = medusa.propose(batch, tree).tokens[batch.temperature > 0]
    assert (tokens[:, 1:] != again[:, 1:]).float().mean() > 0.2


def test_for_strict_every_way_of_drawing_proposes_tokens():
    batch, tree = batch_rows(), TreeOnDevice.of(TREES[1], "cpu")
    proposed = {
        drawing: drafter(drawing).propose(batch, tree).tokens.clamp(min=0)
        for drawing in ("shared_noise", "greedy", "sampled")
    }
    greedy = batch.temperature == 0
    for tokens in proposed.values():
        assert torch.equal(tokens[greedy], proposed["greedy"][greedy])
        assert (tokens >= 0).all()
    assert not torch.equal(proposed["shared_noise"], proposed["sampled"])
    assert not torch.equal(proposed["shared_noise"], proposed["greedy"])
