"""Growing and pruning a draft tree against EAGLE-2 written with heaps and paths of tokens, independently."""

import heapq
import itertools
import random

import numpy as np
import pytest
import torch

from headstart.kernels.speculation import dynamic_tree as module
from headstart.kernels.speculation.dynamic_tree import Candidates, grow, grow_reference, prune, prune_reference
from headstart.tests.kernels.mutants import mutated


def grow_naively(children, width, max_depth, num_nodes):
    """The paths (tuples of tokens) that are expanded, a list per depth, best first, and those that make the tree.

    children(path) -> [(token, log confidence)] of its candidates
    """
    level, pool, expanded, number = [(np.float32(0), 0, ())], [], [], itertools.count()
    for _ in range(max_depth):
        found = []
        for cost, _, path in level:
            for token, gain in children(path):
                loss = np.float32(np.inf) if np.isnan(gain) else max(-np.float32(gain), np.float32(0))
                heapq.heappush(found, (cost + loss, next(number), (*path, token)))
        pool += found
        level = [heapq.heappop(found) for _ in range(width)]
        expanded.append([path for *_, path in level])
    tree = heapq.nsmallest(num_nodes - 1, pool)
    return expanded[:-1], [path for _, _, path in sorted(tree, key=lambda x: x[1])]


class Distributions:
    """Candidates after any path of one request, made up when they are first asked for."""

    def __init__(self, width, kind, seed):
        self.width, self.draw, self.known = width, random.Random(seed), {}
        self.levels = {
            "spread": None,
            "ties": [-1.0, -2.0],
            "neighbours": [-1.0, -1.0 - 2**-23, -1.0 - 2**-22],
            "no chance": [-1.0, -2.0, -np.inf],
            "none": [-np.inf],
            "faulty": [-1.0, -3.0, 0.0, 2.0, -np.inf, np.inf, np.nan],
        }[kind]
        self.log_sums = [0.0, 0.0, np.inf, -np.inf, np.nan] if kind == "faulty" else [0.0]

    def __call__(self, path):
        """-> tokens, scores, log_sum"""
        if path not in self.known:
            tokens = self.draw.sample(range(1000), self.width)
            scores = [self.draw.choice(self.levels) if self.levels else self.draw.gauss(-2, 2) for _ in tokens]
            log_sum = self.draw.choice(self.log_sums) if self.levels else self.draw.gauss(1, 0.5)
            self.known[path] = tokens, scores, log_sum
        return self.known[path]

    def children(self, temperature, path):
        tokens, scores, log_sum = self(path)
        if temperature > 0:
            log_sum = np.logaddexp.reduce([-np.inf if np.isnan(score) else score for score in scores])
        with np.errstate(invalid="ignore"):
            return list(zip(tokens, np.array(scores, dtype=np.float32) - np.float32(log_sum)))


def run(ops, distributions, temperature, width, max_depth, num_nodes, device):
    """The whole tree as a drafter grows it.  -> all that the operations answered, and the expanded paths [B][D - 1][k]"""
    grow, prune = ops
    batch, answers = len(distributions), []
    empty = Candidates.empty(batch, max_depth, width, device)
    candidates = Candidates(*(x.fill_(torch.nan if x.is_floating_point() else -9) for x in empty))
    assert (candidates.width, candidates.max_depth) == (width, max_depth)
    expanded, level, nodes = [[] for _ in distributions], [[()] for _ in distributions], None
    heat = None if temperature is None else torch.tensor(temperature, device=device)
    for depth in range(max_depth):
        said = [
            [distribution(path) for distribution, path in zip(distributions, paths)] for paths in zip(*level)
        ]  # [n][B]
        tokens, scores, log_sums = (
            torch.tensor([[row[i] for row in rows] for rows in said], device=device) for i in range(3)
        )
        nodes = grow(candidates, nodes, tokens, scores.float(), log_sums.float(), heat)
        if depth + 1 == max_depth:
            assert nodes is None
            break
        answers += nodes
        found, parents, _, rows = (x.tolist() for x in nodes)
        level = [
            [(*above[parent], token) for parent, token in zip(*request)]
            for above, *request in zip(level, parents, found)
        ]
        for b, paths in enumerate(level):
            expanded[b].append(paths)
            walked = list(itertools.chain(*expanded[b]))
            assert [[walked[row] for row in way] for way in rows[b]] == [
                [path[: i + 1] for i in range(depth + 1)] for path in paths
            ]
    root = torch.arange(batch, device=device) + 5000
    return [*answers, *candidates, *prune(candidates, root, num_nodes)], expanded


def assert_grown_as_naively(ops, kind, shape, device, seed=0, temperature=None, batch=2):
    width, max_depth, _ = shape
    distributions = [Distributions(width, kind, seed * 100 + b) for b in range(batch)]
    answers, expanded = run(ops, distributions, temperature, *shape, device)
    assert all(x.dtype == torch.int64 or x.dtype == torch.float32 for x in answers)
    tokens, parents, depths, ancestors = (x.tolist() for x in answers[-4:])
    for b, distribution in enumerate(distributions):
        heat = temperature[b] if temperature else 0
        grown, tree = grow_naively(
            lambda path, distribution=distribution, heat=heat: distribution.children(heat, path), *shape
        )
        assert expanded[b] == grown
        paths = [(), *tree]
        assert tokens[b] == [5000 + b, *(path[-1] for path in tree)]
        assert parents[b] == [paths.index(path[:-1]) for path in paths]
        assert depths[b] == [len(path) for path in paths]
        assert ancestors[b] == [[paths.index(path[:depth]) for depth in range(max_depth + 1)] for path in paths]


OURS = grow, prune
KINDS = ("spread", "ties", "neighbours", "no chance", "none", "faulty")
SHAPES = [(9, 1, 5), (3, 4, 14), (7, 2, 57)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: "width{}-depth{}-nodes{}".format(*x))
@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_is_the_one_that_heaps_grow(device, kind, shape):
    assert_grown_as_naively(OURS, kind, shape, device, seed=len(shape))


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2), (1, 4, 5), (1, 4, 3), (3, 2, 2), (10, 6, 60), (16, 4, 64), (17, 8, 40)],
    ids=lambda x: f"width{x[0]}-depth{x[1]}-nodes{x[2]}",
)
def test_the_smallest_trees_and_the_largest(device, shape):
    assert_grown_as_naively(OURS, "ties", shape, device)


@pytest.mark.parametrize("shape", [(3, 4, 14), (10, 2, 40)])
def test_with_noise_the_candidates_share_the_confidence(device, shape):
    """Requests at temperature 0 and above it in one batch."""
    assert_grown_as_naively(OURS, "spread", shape, device, temperature=[0.0, 0.7])
    for seed in range(2):
        assert_grown_as_naively(OURS, "faulty", (4, 1, 4), device, seed=seed, temperature=[0.7, 0.0])
    distributions = [Distributions(3, "spread", b) for b in range(2)]
    answers, _ = run(OURS, distributions, [0.0, 1.0], 3, 1, 2, device)
    weights = answers[0].exp().sum(1)
    assert abs(weights[1] - 1) < 1e-5 < abs(weights[0] - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_answers_what_the_reference_does(kernel_device, kind):
    found, expected = (
        run(ops, [Distributions(6, kind, b) for b in range(3)], None, 6, 3, 30, where)[0]
        for ops, where in ((OURS, kernel_device), ((grow_reference, prune_reference), "cpu"))
    )
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_the_same_in_a_replayed_graph():
    generator = torch.Generator("cuda").manual_seed(0)
    batch, width, depth, num_nodes = 5, 10, 6, 60
    scores = [torch.randn(width if d else 1, batch, width, device="cuda", generator=generator) for d in range(depth)]
    tokens = [torch.randint(1000, x.shape, device="cuda", generator=generator) for x in scores]
    root, log_sums = torch.arange(batch, device="cuda"), [x[..., 0] * 0 + 3 for x in scores]

    def whole(grow, prune):
        candidates, nodes = Candidates.empty(batch, depth, width, "cuda"), None
        for given in zip(tokens, scores, log_sums):
            nodes = grow(candidates, nodes, *given)
        return prune(candidates, root, num_nodes)

    whole(grow, prune)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = whole(grow, prune)
    for _ in range(20):
        for x in scores:
            x.normal_(generator=generator)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, whole(grow_reference, prune_reference), strict=True))


FAULTS = {
    "ties in growing": (
        "chosen = totals.sort(dim=1, descending=True, stable=True).indices[:, :width]",
        "chosen = totals.shape[1] - 1 - totals.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :width]",
    ),
    "ties in pruning": (
        "chosen = candidates.totals.sort(dim=1, descending=True, stable=True).indices[:, : num_nodes - 1]",
        "chosen = count - 1 - candidates.totals.flip(1).sort(dim=1, descending=True, stable=True).indices[:, : num_nodes - 1]",
    ),
    "a child without its parent": ("totals = nodes.values[:, :, None] + totals", "pass"),
    "confidence that grows": (".clamp(max=0).transpose(0, 1)", ".transpose(0, 1)"),
    "NaN wins": ("totals.masked_fill(totals.isnan(), -torch.inf)", "totals"),
    "no noise": ("log_sums = torch.where(temperature > 0, scores.logsumexp(2), log_sums)", "pass"),
    "noise for all": ("torch.where(temperature > 0", "torch.where(temperature >= 0"),
    "numbers within the depth": ("= first + chosen", "= chosen"),
    "another parent": ("parents, paths = chosen // width", "parents, paths = chosen % width"),
    "another one's way": ("nodes.paths.gather(1, parents[", "nodes.paths.gather(1, 0 * parents["),
    "depth off by one": ('rounding_mode="floor") + 2', 'rounding_mode="floor") + 1'),
    "ancestors off by one": ("gather(1, node) > depth", "gather(1, node) >= depth"),
    "the root's children": ("value=count", "value=0"),
}
KERNEL_FAULTS = {
    "ties in growing": (
        "tl.min(tl.where(left == highest, number, 0x7FFFFFFF))",
        "tl.max(tl.where(left == highest, number, -1))",
    ),
    "ties in pruning": (
        "tl.cumsum(equal.to(tl.int32), 0) <= left",
        "tl.sum(equal.to(tl.int32), 0) - tl.cumsum(equal.to(tl.int32), 0) < left",
    ),
    "a child without its parent": ("total += tl.load(values", "gain += tl.load(values"),
    "confidence that grows": ("tl.where(gain > 0.0, 0.0, gain)", "gain"),
    "NaN stays": ("tl.where(total == total, total,", "tl.where(True, total,"),
    "no noise": ("of_these, log_sum)", "log_sum, log_sum)"),
    "noise for all": ("tl.load(temperature + request) > 0", "tl.load(temperature + request) >= 0"),
    "numbers within the depth": ("(first + chosen).to", "(0 * first + chosen).to"),
    "another parent": ("parent.to(tl.int64), mask=here", "(chosen % WIDTH).to(tl.int64), mask=here"),
    "another one's way": ("(request * COUNT + parent) * depth", "(request * COUNT) * depth + 0 * parent"),
    "depth off by one": ("// (WIDTH * WIDTH) + 1, 0)", "// (WIDTH * WIDTH), 0)"),
    "ancestors off by one": ("tl.where(depth > step", "tl.where(depth >= step"),
    "the lowest bit": ("num_candidates, _ordered(total),", "num_candidates, _ordered(total) & -2,"),
    "the sign forgotten": ("0x7FFFFFFF, bits)\n\n", "0, bits)\n\n"),
    "another one's candidates": ("candidate // WIDTH - 1, -1)", "tl.maximum(candidate // WIDTH - 2, -1), -1)"),
}


def assert_all(ops):
    assert_grown_as_naively(ops, "spread", (3, 4, 14), "cpu", temperature=[0.0, 0.7])
    for kind in KINDS:
        for shape in ((9, 1, 5), (4, 3, 20)):
            assert_grown_as_naively(ops, kind, shape, "cpu")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_reference_is_seen(tmp_path, fault):
    mutant = mutated(module, *FAULTS[fault], tmp_path)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        assert_all((mutant.grow_reference, mutant.prune_reference))


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_a_fault_in_the_kernel_is_seen(tmp_path, fault):
    mutant = mutated(module, *KERNEL_FAULTS[fault], tmp_path)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        assert_all((mutant.grow, mutant.prune))


def test_what_does_not_fit_is_refused():
    candidates = Candidates.empty(2, 2, 3, "cpu")
    tokens, scores, sums = torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(1, 2, 3), torch.zeros(1, 2)
    nodes = grow(candidates, None, tokens, scores, sums)
    with pytest.raises(ValueError, match="of 3 nodes of 2 requests"):
        grow(candidates, nodes, tokens, scores, sums)
    with pytest.raises(ValueError, match="with 3 candidates each"):
        grow(candidates, None, tokens[..., :2], scores, sums)
    with pytest.raises(ValueError, match="temperature for each of 2"):
        grow(candidates, None, tokens, scores, sums, torch.zeros(3))
    deeper = [x.expand(3, *x.shape[1:]) for x in (tokens, scores, sums)]
    assert grow(candidates, nodes, *deeper) is None
    with pytest.raises(ValueError, match="at depth 2"):
        grow(candidates, nodes._replace(paths=torch.zeros(2, 3, 2, dtype=torch.int64)), *deeper)
    for num_nodes in (1, 14):
        with pytest.raises(ValueError, match=f"from 2 to 13 nodes, .*{num_nodes}"):
            prune(candidates, torch.zeros(2, dtype=torch.int64), num_nodes)
