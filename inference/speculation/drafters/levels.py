"""A tree, depth by depth, for drafters whose distributions depend on the drafted tokens.

At every depth only nodes with children need a distribution. They are numbered depth by depth, the root first. A node's *row* is
this number less one: the place of its keys and values after the committed ones.

Letters: B requests, N nodes, I nodes with children.
"""

from typing import NamedTuple

import torch

# A choice of columns. None means all of them in order; in a chain it is always None, which costs no launch.
Choice = torch.Tensor | None


def choose(x, choice):
    """The chosen columns of x.  x [B, n, ...]  ->  [B, number chosen, ...]"""
    return x if choice is None else x[:, choice]


def no_distributions(tree):
    """Draft.distribution and Draft.sampled of a draft without sampled nodes: int64 and bool [N]."""
    zeros = torch.zeros_like(tree.depths)
    return zeros, zeros.bool()


class Level(NamedTuple):
    """The nodes with children of one depth, n of them, and their c children."""

    depth: int
    first: int  # number of the first node
    count: int  # n
    nodes: torch.Tensor  # [n] node numbers
    sizes: torch.Tensor  # [n] number of children of each
    width: int  # greatest rank of a child, plus one
    columns: Choice  # [c] place of each child among the candidates [n, width], flattened
    taken: Choice  # [n of the next level] the children that have children
    parents: Choice  # [n of the next level] the place of their parent among the n nodes
    ancestors: torch.Tensor  # [n, depth] rows on the path to each node, its own last; empty for the root
    depths: torch.Tensor  # [n] depth - 1: distance of the node's position from the first row's

    @property
    def is_chain(self):
        """Whether there is one node with children here and at each depth before: keys lie in the order of positions."""
        return self.count == 1 and self.first == self.depth


class GrownLevel(NamedTuple):
    """The nodes of a dynamic tree that are expanded at one depth, with the fields of a Level that `expand` reads."""

    depth: int
    first: int
    count: int
    ancestors: torch.Tensor  # [B, n, depth]
    depths: torch.Tensor  # [n]

    is_chain = False


class GrownLevels:
    """Constants of a growing TreeOnDevice, the same in every step."""

    def __init__(self, tree):
        depths = torch.arange(tree.max_depth, device=tree.depths.device)[:, None]
        self.depths = depths.repeat(1, tree.tree.width)  # [D, k]
        self.chosen = no_distributions(tree)


class Levels:
    """The levels of a TreeOnDevice, and the place of each node in the order of drafting."""

    def __init__(self, tree):
        self.chosen = no_distributions(tree)
        device, tree = tree.depths.device, tree.tree
        children = {n: [m for m in range(1, tree.num_nodes) if tree.parents[m] == n] for n in range(tree.num_nodes)}
        inner, drafted = [0], [0]
        self.levels, first, number = [], 0, {0: 0}

        def tensor(values):
            return torch.tensor(values, dtype=torch.int64, device=device)

        def choice(values, count):
            return None if values == [*range(count)] else tensor(values)

        for depth in range(tree.max_depth):
            width = max(tree.ranks[m] for n in inner for m in children[n]) + 1
            below = [m for n in inner for m in children[n]]
            columns = [inner.index(tree.parents[m]) * width + tree.ranks[m] for m in below]
            following = [m for m in below if children[m]]
            paths = [[number[a] - 1 for a in tree.ancestors[n][1 : depth + 1]] for n in inner]
            self.levels.append(
                Level(
                    depth=depth,
                    first=first,
                    count=len(inner),
                    nodes=tensor(inner),
                    sizes=tensor([len(children[n]) for n in inner]),
                    width=width,
                    columns=choice(columns, len(inner) * width),
                    taken=choice([below.index(m) for m in following], len(below)),
                    parents=choice([inner.index(tree.parents[m]) for m in following], len(inner)),
                    ancestors=tensor(paths).view(len(inner), depth),
                    depths=torch.full((len(inner),), depth - 1, device=device),
                )
            )
            drafted += below
            first += len(inner)
            inner = following
            number |= {n: first + i for i, n in enumerate(inner)}
        self.num_inner = first
        inner = torch.cat([level.nodes for level in self.levels]).tolist()
        self.inner = choice(inner, first)  # None: the first ones, in order
        # [N] place of a node in the order of drafting
        self.order = choice([drafted.index(n) for n in range(tree.num_nodes)], tree.num_nodes)
        # The distribution that a node's children come from; any number for leaves.
        self.distribution = tensor([inner.index(n) if n in inner else 0 for n in range(tree.num_nodes)])
