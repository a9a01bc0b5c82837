"""The exact distribution of a verifier's output, in fp64, by enumeration of all drafts and of both answers for every u.

Every decision of a rule is one comparison `accepts(u_n, ...)`, so the output is piecewise constant in every u_n, with one
breakpoint, the threshold. The comparison is replaced by a function that takes its answer from u and records the threshold t; a
combination of answers then has the weight prod(t or 1 - t). The original rule, with u in the middle of every piece, must agree.

Letters: V vocabulary, D depth, B drafts (rows), C combinations of answers. A table of distributions [V] * d + [V] holds one per
prefix.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch

from headstart.inference.speculation.draft_sampling import sampled_nodes
from headstart.inference.speculation.tree import Tree
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.kernels.speculation import ratio_rules
from headstart.kernels.speculation.ratio_rules import DraftProbabilities


@dataclass
class Case:
    tree: Tree
    p: list  # of tables, depth 0 .. D
    q: list  # of tables, depth 0 .. D - 1
    drawing: str

    @property
    def joint(self):
        """The distribution of the next D + 1 tokens, [V] * (D + 1)."""
        distribution = self.p[0]
        for table in self.p[1:]:
            distribution = distribution[..., None] * table
        return distribution


def children_of(tree, node):
    return [n for n in range(1, tree.num_nodes) if tree.parents[n] == node]


def look_up(table, tokens, ancestors):
    """The distributions after the prefixes that `ancestors` (the root left out) spell.  [V] * d + [V] -> [B, V]"""
    size, index = table.shape[-1], torch.zeros(len(tokens), dtype=torch.int64)
    for node in ancestors:
        index = index * size + tokens[:, node].clamp(min=0)
    return table.reshape(-1, size)[index]


def at_nodes(tree, tables, tokens, nodes):
    """tables -> [B, len(nodes), V]: the distribution at every node of `nodes`."""
    paths = [tree.ancestors[n][1 : tree.depths[n] + 1] for n in nodes]
    return torch.stack([look_up(tables[len(path)], tokens, path) for path in paths], 1)


def all_drafts(case, shared=False):
    """Every draft and its probability.  -> tokens [B, N], weights [B]

    shared: all nodes of a depth get the same draws, as a head gives that does not see the tokens drafted before.
    """
    tree, tokens, weights = case.tree, torch.full((1, case.tree.num_nodes), -1), torch.ones(1, dtype=torch.float64)
    tokens[:, 0] = 0
    for node in range(tree.num_nodes):
        children, depth = children_of(tree, node), tree.depths[node]
        older = [n for n in range(node) if tree.depths[n] == depth and children_of(tree, n)]
        if shared and children and older:
            for child, cousin in zip(children, children_of(tree, older[0]), strict=True):
                tokens[:, child] = torch.where(tokens[:, node] >= 0, tokens[:, cousin], -1)
            continue
        left = look_up(case.q[depth], tokens, tree.ancestors[node][1 : depth + 1]) if children else None
        for child in children:
            chosen = case.drawing == "greedy" or (case.drawing == "top_and_one" and child != children[-1])
            one_hot = torch.nn.functional.one_hot(left.argmax(-1), left.shape[-1]).double()
            distribution = one_hot if chosen else left / left.sum(-1, keepdim=True)
            empty = (left.sum(-1) == 0) | (tokens[:, node] < 0)
            distribution = torch.cat(
                [distribution.masked_fill(empty[:, None], 0), empty[:, None].double()], 1
            )  # the last one: no token
            rows, token = (distribution > 0).nonzero().T
            weights, tokens, left = weights[rows] * distribution[rows, token], tokens[rows], left[rows]
            left[torch.arange(len(rows)), token.clamp(max=left.shape[-1] - 1)] = 0
            tokens[:, child] = torch.where(token < left.shape[-1], token, -1)
    return tokens, weights


def make_draft(case, tokens, q=None, drawing=None):
    """DraftProbabilities of `tokens` [B, N]; q, drawing: others than the case's, for what a wrong engine would hand over."""
    tree = case.tree
    inner = [n for n in range(tree.num_nodes) if children_of(tree, n)] or [0]
    distribution = torch.tensor([inner.index(n) if n in inner else 0 for n in range(tree.num_nodes)])
    drawn = sampled_nodes(drawing or case.drawing, torch.tensor(tree.parents))
    return DraftProbabilities(tokens, at_nodes(tree, q or case.q, tokens, inner), distribution, drawn)


def run(rule, case, drafts=None, draft=None, limit=None):
    """Every draft with every answer of every comparison, R rows.  -> draft, found (Verdict), weights [R], rows [R], and `again`,
    the arguments for the original rule.

    drafts: (tokens [B, N], weights [B]) instead of all; draft: given to the rule instead of the true one.
    """
    tree = case.tree
    tokens, weights = drafts or all_drafts(case)
    draft = draft or make_draft(case, tokens)
    p = at_nodes(tree, case.p, tokens, range(tree.num_nodes))
    answers = torch.cartesian_prod(*[torch.tensor([0, 1])] * (tree.num_nodes - 1)).view(-1, tree.num_nodes - 1)
    rows = torch.arange(len(tokens)).repeat_interleave(len(answers))
    answers = torch.nn.functional.pad(answers, (1, 0)).repeat(len(tokens), 1)  # [R, N]; 1: u is not below the threshold
    thresholds = torch.zeros(answers.shape, dtype=torch.float64)

    def accepts(u, numerator, denominator):
        threshold = (numerator / denominator).nan_to_num(0).clamp(0, 1).expand_as(u)
        thresholds.scatter_(1, u.long().div(2, rounding_mode="floor").view(len(u), -1), threshold.reshape(len(u), -1))
        return u % 2 == 0

    limit = torch.full((len(rows),), tree.max_depth if limit is None else limit)
    draft = draft._replace(tokens=draft.tokens[rows], q=draft.q[rows])
    arguments = TreeOnDevice.of(tree, "cpu"), draft, p[rows]
    with mock.patch.object(ratio_rules, "accepts", accepts):
        found = rule(*arguments, (answers + 2 * torch.arange(tree.num_nodes)).double(), limit)
    chance = torch.where(answers == 0, thresholds, 1 - thresholds)[:, 1:].prod(1)
    middle = torch.where(answers == 0, thresholds / 2, (1 + thresholds) / 2)
    again = (*arguments, middle, limit)
    return SimpleNamespace(draft=draft, found=found, weights=weights[rows] * chance, rows=rows, again=again)


def emitted_distribution(rule, case, **given):
    """The distribution of the next D + 1 tokens under a rule, those after a step's last drawn from p, and how many drafts it
    accepts.
    """
    result = run(rule, case, **given)
    if "drafts" not in given and "draft" not in given:
        possible = result.weights > 0
        for first, second in zip(result.found, rule(*result.again)):
            assert torch.equal(first[possible], second[possible])
    return distribution_of_tokens(case, result.draft.tokens, *result.found, result.weights)


def distribution_of_tokens(case, tokens, path, num_accepted, distribution, weights):
    """The same from rows of outcomes with their weights.  -> distribution [V] * (D + 1), expected number of accepted tokens"""
    assert abs(weights.sum() - 1) < 1e-12
    size, tokens = case.p[0].shape[-1], tokens.gather(1, path)
    total = torch.zeros(())
    for length, table in enumerate(case.p):
        here = (weights > 0) & (num_accepted == length)
        assert (tokens[here, 1 : length + 1] >= 0).all()
        index = torch.zeros(int(here.sum()), dtype=torch.int64)
        for depth in range(1, length + 1):
            index = index * size + tokens[here, depth]
        ends = torch.zeros(size**length, size, dtype=torch.float64)
        ends.index_add_(0, index, weights[here, None] * distribution[here])
        total = total[..., None] * table + ends.view_as(table)
    return total, float((weights * num_accepted).sum())


def total_variation(distribution, case):
    return float((distribution - case.joint).abs().sum() / 2)


def random_distribution(generator, size):
    return (1.5 * torch.randn(size, generator=generator, dtype=torch.float64)).softmax(-1)


def random_pair(generator, size, kind):
    """Distributions p and q [V] of a kind."""
    p, q = random_distribution(generator, size), random_distribution(generator, size)
    some = torch.randperm(size, generator=generator) < size // 2
    one_hot = torch.eye(size, dtype=torch.float64)[torch.randint(size, (2,), generator=generator)]
    if kind == "disjoint":
        p, q = p.masked_fill(some, 0), q.masked_fill(~some, 0)
    elif kind == "equal":
        p = q
    elif kind == "one-hot p":
        p = one_hot[0]
    elif kind == "one-hot q":
        q = one_hot[0]
    elif kind == "one-hot":
        p, q = one_hot
    elif kind == "holed":
        q, p = q.masked_fill(some, 0), p.masked_fill(torch.randperm(size, generator=generator) < 1, 0)
    return p / p.sum(), q / q.sum()


KINDS = ("random", "disjoint", "equal", "one-hot p", "one-hot q", "one-hot", "holed")


def random_case(tree, size, drawing, kind, seed, medusa=False):
    """Distributions of `kind` ("mixed": another kind at every prefix); medusa: q depends on the depth alone."""
    generator = torch.Generator().manual_seed(seed)
    p, q = [], []
    for depth in range(tree.max_depth + 1):
        pairs = []
        for _ in range(size**depth):
            of = KINDS[torch.randint(len(KINDS), (), generator=generator)] if kind == "mixed" else kind
            pairs.append(random_pair(generator, size, of))
        shape = [size] * (depth + 1)
        p.append(torch.stack([pair[0] for pair in pairs]).view(shape))
        q.append(
            (pairs[0][1].expand(shape) if medusa else torch.stack([pair[1] for pair in pairs]).view(shape)).clone()
        )
    return Case(tree, p, q[: tree.max_depth], drawing)
