"""Choose the fastest draft tree from acceptance per depth and rank, and from the costs of steps of several shapes. No torch.

A step over a tree of N nodes and depth D takes about b D + c(N): b for every drafted level, c for the target's pass over the nodes
and the rest of the step. Both come from timed steps. For every depth and size `build_static_tree` gives the best tree, so trying
all of them finds the best tree by these rates and costs. It does not measure anything (tree_measurement.py does).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from statistics import fmean

from ..inference.speculation.tree import MAX_NODES, GrowingTree, build_static_tree, expected_acceptance_length

DYNAMIC_WIDTHS = (2, 4, 8)


def check_budget(budget, batch_size):
    """--budget and --batch-size of `headstart tree` as numbers: (nodes, or None for auto; requests at once).

    Raises ValueError if they are invalid, or do not fit together."""
    if budget != "auto" and not (budget.isdigit() and 2 <= int(budget) <= MAX_NODES):
        raise ValueError(f"--budget must be auto or from 2 to {MAX_NODES} nodes, the root included; got {budget!r}")
    if batch_size is None:
        batch_size = 1
    elif budget != "auto":
        raise ValueError(
            f"--batch-size {batch_size} says what to time, and with --budget {budget} nothing is: drop one"
        )
    if batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {batch_size}")
    return (None if budget == "auto" else int(budget)), batch_size


@dataclass(frozen=True)
class Timing:
    """The time of one step over a tree of this shape."""

    depth: int
    num_nodes: int
    seconds: float


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step. seconds_per_level: b; sizes, ascending, and seconds: c at these numbers of nodes."""

    seconds_per_level: float
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def fit(cls, timings):
        """Least-squares fit of b D + c(N) to the Timings, with costs of levels and nodes that are never negative.

        b can be found only from trees of one size and several depths; without them it is 0.
        """
        if not timings:
            raise ValueError("no step was timed: there are no costs to fit")
        by_size = {}
        for timing in timings:
            by_size.setdefault(timing.num_nodes, []).append(timing)
        depth = {size: fmean(t.depth for t in group) for size, group in by_size.items()}
        mean = {size: fmean(t.seconds for t in group) for size, group in by_size.items()}
        spread = sum((t.depth - depth[t.num_nodes]) ** 2 for t in timings)
        shared = sum((t.depth - depth[t.num_nodes]) * (t.seconds - mean[t.num_nodes]) for t in timings)
        level = max(shared / spread, 0.0) if spread else 0.0
        sizes = sorted(by_size)
        seconds = _rising([mean[size] - level * depth[size] for size in sizes], [len(by_size[size]) for size in sizes])
        return cls(level, tuple(sizes), tuple(seconds))

    def of(self, depth, num_nodes):
        """Seconds of a step: interpolated linearly between timed sizes, constant beyond them."""
        sizes, seconds = self.sizes, self.seconds
        at = bisect_left(sizes, num_nodes)
        if at == len(sizes):
            nodes = seconds[-1]
        elif at == 0 or sizes[at] == num_nodes:
            nodes = seconds[at]
        else:
            share = (num_nodes - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            nodes = seconds[at - 1] + share * (seconds[at] - seconds[at - 1])
        return self.seconds_per_level * depth + nodes


def _rising(values, weights):
    """The nearest values (least squares) that never fall: falling neighbours are replaced by their mean."""
    blocks = []  # [value, weight, number of values]
    for value, weight in zip(values, weights):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (value, weight, count), (before, earlier, number) = blocks.pop(), blocks.pop()
            total = weight + earlier
            blocks.append([(value * weight + before * earlier) / total, total, count + number])
    return [value for value, _, count in blocks for _ in range(count)]


def best_static_trees(rates):
    """The tree of greatest expected acceptance for every depth and number of nodes from 2: {(depth, nodes): Tree}.

    Raises ValueError if no candidate was ever right.
    """
    found = {}
    for limit in range(1, len(rates) + 1):
        for size in range(2, MAX_NODES + 1):
            tree = build_static_tree(rates[:limit], size)
            if tree.num_nodes < size:
                break  # all further nodes have the rate 0
            found.setdefault((tree.max_depth, size), tree)
    if not found:
        raise ValueError(
            "none of the draft's candidates was ever the target's token: there is no tree to build; give other prompts, or train "
            "the head further"
        )
    return found


@dataclass(frozen=True)
class Promise:
    """The expected figures of a tree."""

    depth: int
    num_nodes: int
    tokens_per_step: float
    tokens_per_second: float  # over all requests of the batch


def promises(trees, rates, costs, batch_size):
    """The best depth for every number of nodes.  trees: of best_static_trees  ->  list of Promise, by nodes"""
    best = {}
    for (depth, size), tree in sorted(trees.items()):
        length = expected_acceptance_length(tree, rates)
        promise = Promise(depth, size, length, batch_size * length / costs.of(depth, size))
        if size not in best or promise.tokens_per_second > best[size].tokens_per_second:
            best[size] = promise
    return [best[size] for size in sorted(best)]


def choose_promise(curve):
    """The Promise with the most tokens per second; the smallest tree if several are equal."""
    return max(curve, key=lambda promise: (promise.tokens_per_second, -promise.num_nodes))


def dynamic_candidates(depth, num_nodes, max_depth, most=None):
    """Dynamic trees worth trying if a static tree of this depth and size is the best: list of GrowingTree.

    They have this number of nodes and several widths, at this depth and at the greatest; no more than `most` (None: any), the
    candidates that the draft has after a node. Depth 1 is left out: such a tree has the first ranks, whatever the confidences, and
    is static.
    """
    found = []
    for levels in sorted({depth, max_depth} - {1}):
        for width in DYNAMIC_WIDTHS:
            # A tree that leaves out no candidate would be static.
            if num_nodes <= width + (levels - 1) * width**2 and (most is None or width <= most):
                found.append(GrowingTree(levels, width, num_nodes))
    return found


def other_sizes(tree):
    """A dynamic tree with half and with twice the nodes, if it still leaves out candidates: list of GrowingTree."""
    sizes = {max(tree.num_nodes // 2, 2), min(2 * tree.num_nodes, MAX_NODES, tree.num_candidates)}
    return [replace(tree, num_nodes=size) for size in sorted(sizes - {tree.num_nodes})]
