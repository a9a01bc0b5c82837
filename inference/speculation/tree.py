"""Draft-tree topologies: parents, ranks, depths, ancestors. No torch: plain tuples, built once per engine.

Node 0 is the root (the newest emitted token); every other node is the candidate of one rank at one depth, under its parent.
Nodes are numbered in topological order, siblings by rank. A chain is a tree with one child per node. Ranks may have gaps: where
candidates are listed, best first, a gap leaves one out. Where a node's children are drawn, they are its first draws all the same.
Static trees are built from measured acceptance: `rates[d][r]` is the probability that the target's token at depth d + 1 is the
head's candidate of rank r, given that the parent was accepted. A node's worth is the product along its path, and the m nodes
of the greatest worth are the best tree of m nodes where rates fall with rank (arXiv 2401.10774, section 2.3.3).
"""

import heapq
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...heads.storage.atomic_write import write_whole

MAX_NODES = 64


@dataclass(frozen=True)
class Tree:
    """A topology. parents[n] < n is the parent of node n (-1 for the root); ranks[n] its rank among the depth's candidates."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self):
        if not self.parents or len(self.parents) != len(self.ranks) or self.parents[0] != -1:
            raise ValueError("a tree lists one parent and one rank per node, node 0 being the root with parent -1")
        if not all(type(number) is int for number in (*self.parents, *self.ranks)):
            raise ValueError(f"parents and ranks are whole numbers, got {self.parents} and {self.ranks}")
        if len(self.parents) > MAX_NODES:
            raise ValueError(f"a tree has at most {MAX_NODES} nodes, the root included; got {len(self.parents)}")
        seen = set()
        for node in range(1, len(self.parents)):
            parent, rank = self.parents[node], self.ranks[node]
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before their children")
            if rank < 0 or (parent, rank) in seen:
                raise ValueError(
                    f"node {node} has rank {rank} under parent {parent}: ranks are >= 0, siblings' ranks differ"
                )
            seen.add((parent, rank))

    grows = False  # the tree is known beforehand

    @property
    def num_nodes(self):
        return len(self.parents)

    @property
    def num_rows(self):
        """Number of nodes that drafting may compute, without the root."""
        return self.num_nodes - 1

    @cached_property
    def depths(self):
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self):
        return max(self.depths)

    @cached_property
    def ancestors(self):
        """Per node the path from the root to itself, padded to max_depth + 1 with the node itself."""
        paths = [(0,)]
        for node in range(1, self.num_nodes):
            paths.append((*paths[self.parents[node]], node))
        return tuple(path + (path[-1],) * (self.max_depth + 1 - len(path)) for path in paths)

    @cached_property
    def widths(self):
        """Number of candidates that the head must offer at each depth after the root: the greatest rank there plus one."""
        widths = [0] * self.max_depth
        for depth, rank in zip(self.depths[1:], self.ranks[1:]):
            widths[depth - 1] = max(widths[depth - 1], rank + 1)
        return tuple(widths)

    @property
    def width(self):
        """The most candidates after a node."""
        return max(self.widths, default=0)

    @property
    def deepest(self):
        """The first node of the greatest depth."""
        return self.depths.index(self.max_depth)

    def count_drafted(self, limit):
        """Number of drafted nodes down to depth `limit`."""
        return sum(0 < depth <= limit for depth in self.depths)

    @property
    def is_chain(self):
        return self.parents == tuple(range(-1, self.num_nodes - 1)) and not any(self.ranks)

    def truncated(self, max_depth):
        """The tree without nodes deeper than `max_depth`."""
        kept = [n for n in range(self.num_nodes) if self.depths[n] <= max_depth]
        number = {-1: -1} | {old: new for new, old in enumerate(kept)}
        return Tree(tuple(number[self.parents[n]] for n in kept), tuple(self.ranks[n] for n in kept))

    def without_gaps(self):
        """The same shape for children that are drawn in an order: each node's rank is its place among its siblings' ranks."""
        siblings = {}
        for parent, rank in zip(self.parents, self.ranks):
            siblings.setdefault(parent, []).append(rank)
        places = {parent: {rank: i for i, rank in enumerate(sorted(ranks))} for parent, ranks in siblings.items()}
        return Tree(self.parents, tuple(places[parent][rank] for parent, rank in zip(self.parents, self.ranks)))

    def draw(self):
        """The tree as text, one line per node: its rank under its parent."""
        children = {n: [m for m in range(1, self.num_nodes) if self.parents[m] == n] for n in range(self.num_nodes)}

        def lines(node, indent):
            for i, child in enumerate(children[node]):
                last = i == len(children[node]) - 1
                yield f"{indent}{'└─' if last else '├─'} rank {self.ranks[child]}"
                yield from lines(child, indent + ("   " if last else "│  "))

        return "\n".join(["root", *lines(0, "")])


@dataclass(frozen=True)
class GrowingTree:
    """A tree that is grown anew in every step from the draft's own confidence (EAGLE-2, arXiv 2406.16858).

    At each of max_depth depths, the `width` nodes with the greatest confidence get `width` children each. The best num_nodes - 1 of
    all these candidates make the tree, below the newest token as its root. A node's confidence is the product along its path.
    """

    max_depth: int
    width: int
    num_nodes: int
    grows, is_chain = True, False

    def __post_init__(self):
        for name in ("max_depth", "width", "num_nodes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"a dynamic tree's {name} must be a whole number of at least 1, got {value!r}")
        most = min(MAX_NODES, 1 + self.num_candidates)
        if not 2 <= self.num_nodes <= most:
            raise ValueError(
                f"a dynamic tree of depth {self.max_depth} and width {self.width} has from 2 to {most} nodes, the root included; "
                f"got {self.num_nodes}"
            )

    @property
    def num_candidates(self):
        return self.width + (self.max_depth - 1) * self.width**2

    @property
    def num_rows(self):
        """Number of nodes that are expanded, without the root."""
        return (self.max_depth - 1) * self.width

    def count_drafted(self, limit):
        """All nodes but the root: only the device knows their depths."""
        return self.num_nodes - 1

    def truncated(self, max_depth):
        """The same tree, at most max_depth deep."""
        depth = min(self.max_depth, max_depth)
        most = 1 + self.width + (depth - 1) * self.width**2
        return GrowingTree(depth, self.width, min(self.num_nodes, most))

    def without_gaps(self):
        """Itself: it takes the first ranks after every node."""
        return self

    def draw(self):
        return f"grown in every step: {self.num_nodes} nodes, up to {self.max_depth} deep, {self.width} expanded at each depth"


ROOT_ONLY = Tree((-1,), (0,))
DEFAULT_DYNAMIC = GrowingTree(max_depth=5, width=8, num_nodes=32)


def cut_tree(tree, max_depth):
    """A Tree or GrowingTree cut at max_depth; the root alone for 0."""
    return tree.truncated(max_depth) if max_depth else ROOT_ONLY


def chain(num_tokens):
    """The chain that drafts `num_tokens` tokens (its first candidates only)."""
    return Tree(tuple(range(-1, num_tokens)), (0,) * (num_tokens + 1))


def build_static_tree(rates, num_nodes):
    """The tree of `num_nodes` nodes (root included) with the greatest expected acceptance.

    rates: list over depth of list over rank, conditional on the parent. Nodes of rate 0 are never taken, so the tree can be
    smaller than asked. Raises ValueError for rates outside [0, 1] or num_nodes outside [1, MAX_NODES].
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes must be from 1 to {MAX_NODES}, got {num_nodes}")
    if any(not 0 <= rate <= 1 for ranks in rates for rate in ranks):
        raise ValueError("rates are probabilities: every one must lie in [0, 1]")
    paths = [()]
    frontier = []  # (-worth, path): children of the nodes in `paths`

    def offer(path, worth):
        if len(path) < len(rates):
            for rank, rate in enumerate(rates[len(path)]):
                if rate > 0:
                    heapq.heappush(frontier, (-worth * rate, (*path, rank)))

    offer((), 1.0)
    while frontier and len(paths) < num_nodes:
        worth, path = heapq.heappop(frontier)
        paths.append(path)
        offer(path, -worth)
    paths.sort(key=lambda path: (len(path), path))  # by depth, then rank: topological, and stable to read
    number = {path: n for n, path in enumerate(paths)}
    return Tree(tuple(-1 if not p else number[p[:-1]] for p in paths), tuple(p[-1] if p else 0 for p in paths))


def expected_acceptance_length(tree, rates):
    """Expected tokens per step by `rates`: 1 + the sum over nodes of the product of rates along their path."""
    worth = [1.0]
    for node in range(1, tree.num_nodes):
        depth, rank = tree.depths[node] - 1, tree.ranks[node]
        known = depth < len(rates) and rank < len(rates[depth])
        worth.append(worth[tree.parents[node]] * (rates[depth][rank] if known else 0.0))
    return sum(worth)


def save_tree(tree, path, rates=None, choice=None):
    """Write a Tree as JSON: parents, ranks and, where known, the rates it was built from and the expected length by them.

    A GrowingTree is written as its three numbers. choice: the measurement that chose the tree (tree_measurement.py)."""
    if tree.grows:
        content = {"dynamic": {"max_depth": tree.max_depth, "width": tree.width, "num_nodes": tree.num_nodes}}
    else:
        content = {"parents": list(tree.parents), "ranks": list(tree.ranks)}
    if rates is not None:
        content["rates"] = [[round(rate, 6) for rate in ranks] for ranks in rates]
        if not tree.grows:  # a growing tree's acceptance depends on the draft's confidence
            content["expected_acceptance_length"] = round(expected_acceptance_length(tree, rates), 4)
    if choice is not None:
        content["choice"] = choice
    write_whole(path, json.dumps(content) + "\n")


def load_tree(path):
    """Read a tree written by `save_tree`. ValueError names the file and what is wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"there is no tree file {path}: a tree is chain, static, dynamic, or a file that `headstart tree RUN` wrote"
        )
    try:
        content = json.loads(path.read_text())
        if "dynamic" in content:
            return GrowingTree(**content["dynamic"])
        return Tree(tuple(content["parents"]), tuple(content["ranks"]))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a tree file ({error}); expected JSON with lists 'parents' and 'ranks', or 'dynamic' with max_depth, "
            "width and num_nodes"
        ) from error
