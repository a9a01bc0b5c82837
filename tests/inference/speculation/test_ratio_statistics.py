"""The verifiers with the real generator and drafter, over several steps: the joint distribution of three tokens, by a G-test.

The target is a table: the distribution of a token given the one before it, so that a hundred thousand requests are one batch.
Everything else is the engine's: heads, draws per node, uniforms, residuals, and their keys from step to step. On a GPU those are
the kernels.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.inference.engine.target_scores import CUT, NO_FILTERS, TargetScores, draft_scores
from headstart.inference.speculation import draw_nodes, verifiers
from headstart.inference.speculation.drafters.medusa import MedusaDrafter
from headstart.inference.speculation.tree import Tree, chain
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.inference.speculation.verifiers import Ratio, Strict
from headstart.kernels.sampling.keep_top import keep_top_reference, kept_scores_reference
from headstart.kernels.sampling.philox import gumbel
from headstart.kernels.sampling.process_logits import LogitTables
from headstart.kernels.speculation import ratio_rules
from headstart.tests.inference.speculation.draw_children import draw_children
from headstart.tests.inference.speculation.g_test import surprise
from headstart.tests.inference.speculation.given_target import GivenTarget

VOCAB, HIDDEN, ROOT = 4, 8, 1
FEWER = 4000  # requests: on the CPU the target's noise is made row by row
BALANCED = Tree((-1, 0, 0, 1, 1, 2, 2), (0, 0, 1, 0, 1, 0, 1))
NO_TABLES = SimpleNamespace(logit_state=SimpleNamespace(tables=LogitTables()))
CUTS = {"top_k": 3, "top_p": 0.9, "min_p": 0.02}
RULES = [("token", chain(2)), ("block", chain(2)), ("recursive", BALANCED), ("traversal", BALANCED)]


class Table:
    """A target whose next token depends on the newest one, and heads that guess it badly: many ways of failing are seen."""

    def __init__(self, drawing, device, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.logits = 1.2 * torch.randn(VOCAB, VOCAB, generator=generator)  # [newest token, V]
        head = Medusa(MedusaConfig(num_heads=2, hidden_size=HIDDEN, vocab_size=VOCAB, shared_lm_head=False))
        for one in head.heads:
            torch.nn.init.normal_(one.blocks[0].linear.weight, std=0.2, generator=generator)
            torch.nn.init.normal_(one.lm_head.weight, std=1.2, generator=generator)
        # One-hot features: the heads know the newest token.
        self.features = torch.nn.functional.one_hot(torch.arange(VOCAB), HIDDEN).float().to(device)
        self.drafter = MedusaDrafter(
            head.requires_grad_(False).to(device),
            SimpleNamespace(lm_head=torch.zeros(VOCAB, HIDDEN, device=device)),
            sampling=drawing,
        )
        self.temperature = 0.8

    def joint(self, filters=NO_FILTERS):
        """The distribution of three tokens after ROOT.  [V^3]"""
        p = (self.logits.double() / self.temperature).softmax(-1)
        if filters:
            rows = [torch.full((VOCAB,), x) for x in (self.temperature, *CUTS.values())]
            p = kept_scores_reference(keep_top_reference(self.logits, *rows)).double().softmax(-1)
            assert (p == 0).any()
        return (p[ROOT][:, None, None] * p[:, :, None] * p[None]).flatten()

    def steps(self, rule, tree, count, device, filters=NO_FILTERS):
        """Three tokens of each of `count` requests, by as many steps as they take.  -> counts [V^3]"""
        tree = TreeOnDevice.of(tree, device)
        rows = torch.arange(count, device=device)
        output = torch.full((count, 3 + tree.max_depth + 1), -1, device=device)
        emitted = torch.zeros_like(rows)
        heat = torch.full((count,), self.temperature, device=device)
        logits = self.logits.to(device)
        while (emitted < 3).any():
            newest = output.gather(1, (emitted - 1).clamp(min=0)[:, None]).squeeze(1)
            root = torch.where(emitted > 0, newest, ROOT)
            batch = SimpleNamespace(
                root=root, feature=self.features[root], temperature=heat, seed=rows * 7919 + 3, sample=rows % 3,
                committed=emitted + 10, remaining=torch.full_like(rows, 99), seats=rows,
                node_temperature=heat.repeat_interleave(tree.num_nodes),
                **{name: torch.full((count,), value, device=device) for name, value in CUTS.items()},
            )  # fmt: skip
            position = (batch.committed[:, None] + tree.depths + 1).flatten()  # of the token drawn after every node
            batch.draws = (*(x.repeat_interleave(tree.num_nodes) for x in (batch.seed, batch.sample)), position)
            processor = partial(draft_scores, batch, filters, NO_TABLES, tree.max_depth) if filters else None
            draft = self.drafter.propose(batch, tree, processor)
            tokens = draft.tokens.clamp(min=0)  # [B, N]
            target = TargetScores(batch, logits[tokens].flatten(0, 1), filters, NO_TABLES, drafted=tokens)
            verifier = Strict() if rule == "strict" else Ratio(rule)
            path, num_accepted, bonus = verifier(tree, draft, target)
            here = torch.where(emitted < 3, emitted, 3)
            for depth in range(tree.max_depth + 1):
                drafted = tokens.gather(1, path[:, min(depth + 1, tree.max_depth), None]).squeeze(1)
                token = torch.where(depth < num_accepted, drafted, bonus)
                place = (here + depth)[:, None]
                token = torch.where(depth <= num_accepted, token, output.gather(1, place).squeeze(1))
                output.scatter_(1, place, token[:, None])
            emitted = torch.where(emitted < 3, emitted + num_accepted + 1, emitted)
        cell = (output[:, :3] * VOCAB ** torch.arange(2, -1, -1, device=device)).sum(1)
        return torch.bincount(cell, minlength=VOCAB**3).cpu()


def measured(rule, tree, drawing="sampled", count=60_000, device="cpu", filters=NO_FILTERS):
    table = Table(drawing, device)
    found, distribution = table.steps(rule, tree, count, device, filters), table.joint(filters)
    assert not found[distribution == 0].any()
    return surprise(found[distribution > 0], distribution[distribution > 0])


# In a chain the one child is drawn, so "top_and_one" is "sampled".
@pytest.mark.parametrize(
    ("rule", "tree", "drawing"),
    [
        (rule, tree, drawing)
        for rule, tree in RULES
        for drawing in ("sampled", "greedy", *["top_and_one"] * (not tree.is_chain))
    ],
)
def test_three_tokens_follow_the_targets_distribution(rule, tree, drawing):
    assert measured(rule, tree, drawing) < 6


@pytest.mark.parametrize(("rule", "tree"), RULES)
def test_three_tokens_follow_the_distribution_that_filters_leave(rule, tree):
    assert measured(rule, tree, filters=CUT) < 6


@pytest.mark.parametrize("filters", [NO_FILTERS, CUT])
@pytest.mark.parametrize("drawing", ["shared_noise", "sampled"])
def test_three_tokens_of_strict_do(drawing, filters):
    assert measured("strict", BALANCED, drawing, FEWER, filters=filters) < 6


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("drawing", "filters"),
    [("sampled", NO_FILTERS), ("top_and_one", NO_FILTERS), ("greedy", NO_FILTERS), ("sampled", CUT)],
)
@pytest.mark.parametrize(("rule", "tree"), RULES)
def test_a_million_times_three_tokens_follow_the_targets_distribution(rule, tree, drawing, filters):
    assert measured(rule, tree, drawing, 1_000_000, "cuda", filters) < 6


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("drawing", "filters"), [("shared_noise", NO_FILTERS), ("greedy", NO_FILTERS), ("shared_noise", CUT)]
)
@pytest.mark.parametrize("tree", [chain(2), BALANCED])
def test_a_million_times_three_tokens_of_strict_do(tree, drawing, filters):
    assert measured("strict", tree, drawing, 1_000_000, "cuda", filters) < 6


def keyed_by_position(scores, width, distributions, nodes, temperature, seed, sample, position):
    """What is wrong: noise of the position drafted for, as the target's is; it comes again in the next step."""
    noise = gumbel(seed, sample, position + 1 + distributions[:, None], scores.shape[-1], 1)
    return draw_children(scores[distributions] / temperature[:, None] + noise, width, "greedy")


def shared_by_a_depth(scores, width, distributions, nodes, *keys):
    """What is wrong: nodes of a depth have the same children."""
    first = torch.stack([(distributions == distribution).int().argmax() for distribution in distributions])
    return draw_tokens(scores, width, distributions, nodes[first], *keys)


draw_tokens = draw_nodes.draw_tokens


@pytest.mark.parametrize(
    ("rule", "tree", "wrong"), [("block", chain(2), keyed_by_position), ("traversal", BALANCED, shared_by_a_depth)]
)
def test_draft_noise_that_is_not_fresh_is_seen(rule, tree, wrong, monkeypatch):
    monkeypatch.setattr(draw_nodes, "draw_tokens", wrong)
    assert measured(rule, tree) > 6


def test_noise_of_the_root_for_every_node_is_seen(monkeypatch):
    """What is wrong with `strict`: tokens of one step drawn with the same noise."""

    sample = TargetScores.sample

    def wrong(scores):
        batch = scores.batch
        batch.draws = (*batch.draws[:2], batch.committed.repeat_interleave(len(batch.draws[2]) // len(batch.committed)))
        return sample(scores)

    monkeypatch.setattr(TargetScores, "sample", wrong)
    assert measured("strict", chain(2), "sampled", FEWER) > 6


def test_residual_noise_from_the_drafts_is_seen(monkeypatch):
    monkeypatch.setattr(ratio_rules, "RESIDUAL_NOISE", 1)  # DRAFT_NOISE at node 0
    assert measured("token", chain(2)) > 6


def test_a_draft_distribution_of_another_temperature_is_seen(monkeypatch):
    real = verifiers.verify_ratio

    def wrong(rule, draft_temperature, **given):
        return real(rule, draft_temperature=draft_temperature * 1.25, **given)

    monkeypatch.setattr(verifiers, "verify_ratio", wrong)
    for rule, tree in RULES:
        assert measured(rule, tree) > 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_where_q_underflows_the_distribution_is_kept(rule, device):
    """The second child is drawn from what is e^-1000 under the first: q = 0 must not read as a token that the draft never gives."""
    tree, count = TreeOnDevice.of(Tree((-1, 0, 0), (0, 0, 1)), device), 20_000
    rows, ones = torch.arange(count, device=device), torch.ones(count, device=device)
    p = torch.tensor([0.1, 0.5, 0.3, 0.1], dtype=torch.float64)
    batch = SimpleNamespace(root=rows * 0, seed=rows, sample=rows * 0, committed=rows * 0 + 7, remaining=rows * 0 + 9)
    scores = torch.tensor([0.0, -1000.0, -1000.0, -1000.0], device=device).expand(1, count, -1).contiguous()
    draft = draw_nodes.NodeDraws(tree, "sampled")(batch, scores, ones)
    assert len(draft.tokens[:, 2].unique()) == 3
    target = p.log().float().to(device).expand(3 * count, -1)
    given = GivenTarget(batch, draft.tokens, given=(target, ones.repeat(3)))
    path, num_accepted, bonus = Ratio(rule)(tree, draft, given)
    first = torch.where(num_accepted > 0, draft.tokens.gather(1, path[:, 1:2]).squeeze(1), bonus)
    assert surprise(torch.bincount(first.cpu(), minlength=4), p) < 6
