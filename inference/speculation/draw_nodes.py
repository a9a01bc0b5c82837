"""Draw a whole draft at once, from distributions that do not depend on the drafted tokens: one per depth, as Medusa heads give.

Every node draws its own children (draft_sampling.py lists the ways, and says why not once per depth), all nodes in one launch.
No distribution is copied: nodes refer to the scores whose softmax it is.

Letters: B requests, N nodes, L distributions, V vocabulary, I nodes with children, W the greatest number of children, k the number
of a node's children.
"""

from typing import NamedTuple

import torch

from ...kernels.sampling.sample import draw_tokens
from .draft import Draft
from .draft_sampling import sampled_nodes


class Families(NamedTuple):
    """Nodes that draw children, each family from one distribution."""

    width: int  # the greatest number of children
    distributions: torch.Tensor  # int64 [I]: a node's place among the scores
    nodes: torch.Tensor  # int64 [I]: its number in the tree
    sizes: torch.Tensor  # int64 [I]: its number of children


class NodeDraws:
    """Samples the nodes of one tree (TreeOnDevice) in the ways "sampled" and "top_and_one", from one distribution per depth."""

    def __init__(self, tree, sampling):
        parents, ranks = tree.tree.parents, tree.tree.ranks
        inner = sorted(set(parents[1:]))
        sizes = [parents[1:].count(n) for n in inner]
        self.tree, self.sampling, width = tree, sampling, max(sizes)
        device = tree.depths.device
        nodes = torch.tensor(inner, device=device)
        # The children of depth d + 1 come from head d.
        self.families = Families(width, tree.depths[nodes], nodes, torch.tensor(sizes, device=device))
        columns = [inner.index(parent) * width + rank for parent, rank in zip(parents[1:], ranks[1:])]
        self.columns = torch.tensor(columns, device=device)
        self.distribution = tree.depths.clamp(max=max(tree.max_depth - 1, 0))
        self.sampled = sampled_nodes(sampling, torch.tensor(parents, device=device))

    def __call__(self, batch, scores, temperature, kept=None):
        """batch: BatchRows; scores [L, B, V], temperature [B], kept: as in Draft  ->  Draft"""
        keys = batch.seed, batch.sample, batch.committed
        found = draw_families(self.sampling, scores, self.families, temperature, keys)  # [I, B, W]
        found = found.transpose(0, 1).flatten(1)[:, self.columns]  # [B, N - 1]
        tokens = torch.cat((batch.root[:, None], found), 1)
        return Draft(
            tokens, self.tree, scores, temperature, distribution=self.distribution, sampled=self.sampled, kept=kept
        )


def draw_families(sampling, scores, families, temperature, keys):
    """The children of I nodes, in the order in which they are sampled; sampling: "sampled" or "top_and_one".

    scores [L, B, V]; families: Families; temperature [B]; keys: seed, sample and position of the step's root, [B] each
    ->  int64 [I, B, W], -1: an empty node
    """
    width, distributions, nodes, sizes = families
    draws = draw_tokens(scores, width, distributions, nodes, temperature, *keys)
    if sampling == "sampled":
        return draws
    # The k - 1 likeliest tokens, then the first draw that is not one of them. There is always one, as at most k - 1 of k draws
    # without replacement are among the likeliest; and it has the highest perturbed score of the rest.
    likeliest = draw_tokens(scores, width, distributions, nodes, torch.zeros_like(temperature), *keys)
    place = torch.arange(width, device=draws.device)
    last = (sizes - 1)[:, None, None]  # place of a node's drawn child
    known = torch.where(place < last, likeliest, -2)
    free = ~(draws[..., None] == known[..., None, :]).any(-1)  # [I, B, W]
    one = draws.gather(-1, free.to(torch.uint8).argmax(-1, keepdim=True))
    one = torch.where(free.any(-1, keepdim=True), one, -1)
    return torch.where(place == last, one, likeliest)
