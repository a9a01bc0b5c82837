"""The ratio rules keep the target's distribution: by enumeration in fp64 on small vocabularies, and against the rules told as
recursions.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from headstart.inference.speculation.draft_sampling import sampled_nodes
from headstart.inference.speculation.tree import Tree, chain
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.kernels.speculation.ratio_rules import (
    RATIO_RULES,
    DraftProbabilities,
    block,
    draw,
    recursive,
    token,
    traversal,
    without,
)
from headstart.kernels.speculation.verify_strict import verify_strict_reference
from headstart.tests.inference.speculation.draw_children import draw_children
from headstart.tests.inference.speculation.enumeration import (
    KINDS,
    all_drafts,
    at_nodes,
    children_of,
    distribution_of_tokens,
    emitted_distribution,
    look_up,
    make_draft,
    random_case,
)

EXACT = 1e-12
DRAFT_SAMPLING = ("greedy", "sampled", "top_and_one")
CHAINS = [(chain(1), 5), (chain(2), 4), (chain(3), 3)]  # with the vocabulary's size
TREES = [
    (Tree((-1, 0, 0), (0, 0, 1)), 5),
    (Tree((-1, 0, 0, 0), (0, 0, 1, 2)), 4),
    (Tree((-1, 0, 0, 1, 1, 2, 2), (0, 0, 1, 0, 1, 0, 1)), 3),
    (Tree((-1, 0, 0, 0, 1, 1, 4), (0, 0, 1, 2, 0, 1, 0)), 3),  # the first child has the largest subtree, 3 deep
    (Tree((-1, 0, 0, 2, 2, 3), (0, 0, 1, 0, 1, 0)), 4),  # the last child has
    (Tree((-1, 0, 1, 1, 0, 4), (0, 0, 0, 1, 1, 0)), 3),  # numbered depth first
]
FALLING = TREES[:4]  # no later sibling has a larger subtree


# In a chain the one child is drawn, so "top_and_one" is "sampled".
@pytest.mark.parametrize(
    ("number", "drawing"),
    [
        (number, drawing)
        for number, (tree, _) in enumerate(CHAINS + TREES)
        for drawing in DRAFT_SAMPLING
        if not tree.is_chain or drawing != "top_and_one"
    ],
)
def test_every_rule_keeps_the_targets_distribution(number, drawing):
    tree, size = (CHAINS + TREES)[number]
    for kind, medusa in [*product(KINDS, [False]), ("mixed", False), ("mixed", True), ("random", True)]:
        case = random_case(tree, size, drawing, kind, seed=number, medusa=medusa)
        for rule in RATIO_RULES.values() if tree.is_chain else (recursive, traversal):
            distribution, _ = emitted_distribution(rule, case)
            assert (distribution - case.joint).abs().max() < EXACT, (rule.__name__, kind)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_depth_limit_keeps_the_distribution_and_is_kept(limit):
    for tree, size in (CHAINS[2], TREES[3]):
        case = random_case(tree, size, "sampled", "random", seed=4)
        for rule in RATIO_RULES.values() if tree.is_chain else (recursive, traversal):
            distribution, accepted = emitted_distribution(rule, case, limit=limit)
            assert (distribution - case.joint).abs().max() < EXACT
            assert accepted <= limit
            assert (accepted > 0) == (limit > 0)


@pytest.mark.parametrize("drawing", DRAFT_SAMPLING)
def test_strict_keeps_the_distribution_and_accepts_the_sum_over_nodes_of_p(drawing):
    for tree, size in (CHAINS[1], TREES[0], TREES[4] if drawing == "greedy" else CHAINS[2]):
        case = random_case(tree, 3 if tree.num_nodes > 4 else size, drawing, "holed", seed=2)
        tokens, weights = all_drafts(case)
        p = at_nodes(tree, case.p, tokens, range(tree.num_nodes))  # [B, N, V]
        targets = torch.cartesian_prod(*[torch.arange(p.shape[-1])] * tree.num_nodes)  # [C, N] the target's own tokens
        chance = (
            p[:, None].expand(-1, len(targets), -1, -1).gather(3, targets[None, ..., None].expand(len(p), -1, -1, 1))
        )
        weights = (weights[:, None] * chance.squeeze(3).prod(2)).flatten()
        expected = 0.0
        for node in range(1, tree.num_nodes):
            reached = all_drafts(case)[1]
            for child in tree.ancestors[node][1 : tree.depths[node] + 1]:
                distribution = p[:, tree.parents[child]]
                x = tokens[:, child]
                reached = reached * torch.where(x >= 0, distribution.gather(1, x.clamp(min=0)[:, None]).squeeze(1), 0)
            expected += float(reached.sum())
        tensors, rows = TreeOnDevice.of(tree, "cpu"), torch.arange(len(tokens)).repeat_interleave(len(targets))
        drafted, targets = tokens[rows], targets.repeat(len(tokens), 1)
        path, num_accepted, bonus = verify_strict_reference(
            tensors.parents, tensors.depths, drafted, targets, torch.full_like(rows, 9), tree.max_depth
        )
        distribution = torch.nn.functional.one_hot(bonus, p.shape[-1]).double()
        distribution, accepted = distribution_of_tokens(case, drafted, path, num_accepted, distribution, weights)
        assert (distribution - case.joint).abs().max() < EXACT
        assert accepted == pytest.approx(expected, abs=EXACT)


def test_block_accepts_at_least_as_much_as_token_and_traversal_as_recursive():
    most = {}
    for (tree, size), seed, drawing in product(CHAINS[1:] + FALLING[2:], range(4), ("sampled", "top_and_one")):
        case = random_case(tree, size, drawing, "random", seed)
        better, plain = (block, token) if tree.is_chain else (traversal, recursive)
        gain = emitted_distribution(better, case)[1] - emitted_distribution(plain, case)[1]
        assert gain > -EXACT
        most[better] = max(most.get(better, 0), gain)
    assert most[block] > 0.02
    assert most[traversal] > 0.02


def test_behind_a_one_hot_draft_block_accepts_as_many_as_token():
    for kind, seed in product(("random", "holed", "mixed"), range(4)):
        case = random_case(chain(3), 3, "greedy", kind, seed)
        (first, length), (second, other) = emitted_distribution(block, case), emitted_distribution(token, case)
        assert length == pytest.approx(other, abs=EXACT)
        assert (first - second).abs().max() < EXACT


def test_on_a_chain_the_rules_for_trees_decide_as_those_for_chains():
    """For every u, not only in distribution; and where some tokens count as drawn and others as chosen."""
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for kind, drawing in product((*KINDS, "mixed"), DRAFT_SAMPLING):
        case = random_case(chain(3), 4, drawing, kind, seed=5)
        tokens, _ = all_drafts(case)
        tokens = tokens.repeat(20, 1)
        p = at_nodes(case.tree, case.p, tokens, range(4))
        u = torch.rand(tokens.shape, generator=generator, dtype=torch.float64)
        limit = torch.randint(0, 4, (len(tokens),), generator=generator)
        draft = make_draft(case, tokens)
        mixed = draft.sampled ^ (torch.rand(tokens.shape, generator=generator) < 0.3)  # [B, N]
        arguments = TreeOnDevice.of(case.tree, "cpu"), draft._replace(sampled=mixed), p, u, limit
        for on_chain, on_tree in ((token, recursive), (block, traversal)):
            first, second = on_chain(*arguments), on_tree(*arguments)
            assert torch.equal(first.path, second.path)
            assert torch.equal(first.num_accepted, second.num_accepted)
            assert torch.allclose(first.distribution, second.distribution, rtol=0, atol=EXACT)
            lengths |= set(first.num_accepted.tolist())
    assert lengths == {0, 1, 2, 3}


class Telling:
    """One request's tree, as the papers tell the rules: by recursion over nodes."""

    def __init__(self, parents, tokens, p, q, distribution, drawn, u, limit):
        self.children = [[c for c in range(1, len(parents)) if parents[c] == n] for n in range(len(parents))]
        self.tokens, self.p, self.q, self.distribution, self.drawn, self.u, self.limit = (
            tokens,
            p,
            q,
            distribution,
            drawn,
            u,
            limit,
        )

    def slots(self, node, depth):
        """(child, token, distribution of its slot) of the children there are."""
        left = self.q[self.distribution[node]].clone()
        for child in self.children[node]:
            x = self.tokens[child].item()
            if x < 0 or depth >= self.limit:
                return
            yield child, x, left / left.sum() if self.drawn[child] else torch.eye(len(left), dtype=left.dtype)[x]
            left[x] = 0

    def recursive(self, node=0, depth=0):
        p = self.p[node]
        for child, x, q in self.slots(node, depth):
            if self.u[child] < p[x] / q[x]:
                path, distribution = self.recursive(child, depth + 1)
                return [node, *path], distribution
            p = (p - q).clamp(min=0)
            p = p / p.sum()
        return [node], p

    def traversal(self, node=0, depth=0, r=1.0):
        p = self.p[node]
        for child, x, q in self.slots(node, depth):
            found = self.traversal(child, depth + 1, min(1.0, (r * p[x] / q[x]).item()))
            if found:
                return [node, *found[0]], found[1]
            left = (r * p - q).clamp(min=0)
            r = 0.0 if left.sum() == 0 else (left.sum() / (left.sum() + 1 - r)).item()
            p = left / left.sum() if left.sum() > 0 else p
        return ([node], p) if self.u[node] < r else None


@pytest.mark.parametrize("drawing", DRAFT_SAMPLING)
def test_trees_of_many_nodes_are_judged_as_the_papers_tell_it(drawing):
    """Up to 40 nodes, another topology and depth limit per request, children drawn by draw_children, slots left empty."""
    size, nodes, batch = 7, 40, 60
    generator = torch.Generator().manual_seed(len(drawing))
    spread = dict(generator=generator, dtype=torch.float64)
    parents, depths, distribution = (torch.zeros(batch, nodes, dtype=torch.int64) for _ in range(3))
    tokens = torch.full((batch, nodes), -1).index_fill(1, torch.tensor([0]), 0)
    p = (1.5 * torch.randn(batch, nodes, size, **spread)).softmax(-1)
    noisy = (p.log() + torch.randn(p.shape, **spread)).masked_fill(torch.rand(p.shape, **spread) < 0.6, -torch.inf)
    noisy[..., 0] = noisy[..., 0].clamp(min=-9)  # a support of at least one token
    q = noisy.softmax(-1)
    for b in range(batch):
        for n in range(1, nodes):
            parents[b, n] = torch.randint(max(0, n // 2 - 3), n // 2 + 1, (), generator=generator)
            depths[b, n] = depths[b, parents[b, n]] + 1
        inner = parents[b, 1:].unique()
        distribution[b, inner] = torch.arange(len(inner)).flip(0)
        for n in inner.tolist():
            slots = ((parents[b] == n) & (torch.arange(nodes) > 0)).nonzero().squeeze(1)
            noise = None if drawing == "greedy" else -torch.log(-torch.log(torch.rand(size, **spread)))
            tokens[b, slots] = draw_children(q[b, distribution[b, n]].log(), len(slots), drawing, noise)
    u = torch.rand(batch, nodes, **spread)
    limit = torch.randint(0, 9, (batch,), generator=generator)
    tree = SimpleNamespace(parents=parents, depths=depths, max_depth=int(depths.max()))
    drawn = sampled_nodes(drawing, parents.masked_fill(torch.arange(nodes) == 0, -1))
    assert ((tokens.gather(1, parents) < 0) & (tokens >= 0)).sum() > 20  # tokens below empty slots
    for rule in (recursive, traversal):
        path, num_accepted, emitted = rule(tree, DraftProbabilities(tokens, q, distribution, drawn), p, u, limit)
        for b in range(batch):
            telling = Telling(*(x[b] for x in (parents, tokens, p, q, distribution, drawn, u)), limit[b].item())
            expected, expected_distribution = getattr(telling, rule.__name__)()
            assert path[b].tolist() == expected + expected[-1:] * (tree.max_depth + 1 - len(expected))
            assert num_accepted[b] == len(expected) - 1 <= limit[b]
            assert torch.allclose(emitted[b], expected_distribution, rtol=0, atol=1e-10)
        assert num_accepted.max() >= 2
        assert (num_accepted == 0).any()


def test_in_fp32_the_rules_decide_as_in_fp64():
    """At 1,013 tokens, also where p and q are equal but for rounding: no NaN, a distribution that sums to 1."""
    generator, tree, batch, size = torch.Generator().manual_seed(1), TREES[2][0], 400, 1013
    logits = 2 * torch.randn(batch, tree.num_nodes, size, generator=generator, dtype=torch.float64)
    other = logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    other[: batch // 2] = logits[: batch // 2] + 1e-7 * other[: batch // 2]
    p, q = logits.softmax(-1), other[:, :3].softmax(-1)
    noise = -torch.log(-torch.log(torch.rand(q.shape, generator=generator, dtype=torch.float64)))
    tokens = torch.cat(
        [torch.zeros(batch, 1, dtype=torch.int64), draw_children(q.log(), 2, "sampled", noise).flatten(1)], 1
    )
    u = torch.rand(tokens.shape, generator=generator, dtype=torch.float64)
    distribution = torch.tensor([0, 1, 2, 0, 0, 0, 0])
    for rule in (recursive, traversal):
        wide, narrow = (
            rule(
                TreeOnDevice.of(tree, "cpu"),
                DraftProbabilities(tokens, q.to(dtype), distribution, torch.ones(7, dtype=torch.bool)),
                p.to(dtype),
                u,
                torch.full((batch,), 2),
            )
            for dtype in (torch.float64, torch.float32)
        )
        assert narrow.distribution.dtype == torch.float32
        assert torch.equal(wide.path, narrow.path)
        assert (wide.num_accepted[: batch // 2] == 2).all()
        assert set(wide.num_accepted[batch // 2 :].tolist()) == {0, 1, 2}
        assert (narrow.distribution.sum(-1) - 1).abs().max() < 1e-5
        assert (wide.distribution - narrow.distribution).abs().max() < 1e-5


@pytest.mark.parametrize("rule", RATIO_RULES.values())
def test_where_the_residual_has_no_mass_the_targets_distribution_is_emitted(rule):
    """q is above p by one rounding at the token, and u between them: it is rejected, and nothing is left of p - q."""
    p = torch.tensor([0.25, 0.5, 0.25, 0.0])
    q = torch.nextafter(p, torch.ones(4))
    draft = DraftProbabilities(
        torch.tensor([[0, 1]]), q.view(1, 1, 4), torch.tensor([0, 0]), torch.tensor([True, True])
    )
    u = torch.full((1, 2), 1 - 2.0**-32, dtype=torch.float64)
    found = rule(TreeOnDevice.of(chain(1), "cpu"), draft, p.expand(1, 2, 4), u, torch.tensor([1]))
    assert found.num_accepted.item() == 0
    assert torch.equal(found.distribution[0], p)


@pytest.mark.parametrize("rule", [recursive, traversal])
def test_what_hangs_below_an_empty_slot_is_not_accepted(rule):
    tree = Tree((-1, 0, 0, 2), (0, 0, 1, 0))
    tokens, distributions = torch.tensor([[0, 1, -1, 1]]), torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft = DraftProbabilities(tokens, distributions, torch.tensor([0, 0, 1, 0]), torch.ones(4, dtype=torch.bool))
    p = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    found = rule(TreeOnDevice.of(tree, "cpu"), draft, p, torch.zeros(1, 4), torch.tensor([2]))
    assert (found.num_accepted.item(), found.distribution.tolist()) == (0, [[1.0, 0.0]])


def test_without_a_draft_the_targets_distribution_is_emitted():
    p = torch.tensor([[[0.2, 0.8]], [[1.0, 0.0]]])
    draft = DraftProbabilities(torch.tensor([[1], [0]]), torch.zeros(2, 1, 2), torch.tensor([0]), torch.tensor([True]))
    for rule in RATIO_RULES.values():
        found = rule(TreeOnDevice.of(chain(0), "cpu"), draft, p, torch.zeros(2, 1), torch.tensor([0, 5]))
        assert (found.path.tolist(), found.num_accepted.tolist()) == ([[0], [0]], [0, 0])
        assert torch.equal(found.distribution, p[:, 0])


def test_draw_takes_the_highest_perturbed_score_of_the_support():
    distribution = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.6, 0.3]])
    assert draw(distribution, torch.zeros(2, 3)).tolist() == [0, 1]
    assert draw(distribution, torch.tensor([[0.0, 1.0, 90.0], [5.0, 0.0, 0.0]])).tolist() == [1, 0]


def test_look_up_finds_the_distribution_of_a_prefix():
    table = torch.arange(27.0).view(3, 3, 3)
    assert look_up(table, torch.tensor([[9, 2, 0, 1]]), (1, 3)).tolist() == table[2, 1][None].tolist()
    assert children_of(TREES[2][0], 2) == [5, 6]


def test_siblings_that_leave_no_mass_leave_zeros():
    q = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)
    rest = without(q, torch.tensor([1, 0]))
    assert rest.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5]]
