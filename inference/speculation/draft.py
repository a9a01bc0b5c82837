"""Draft: the proposal of a drafter in one step.

Letters: B requests, N nodes, L draft distributions, V vocabulary.
"""

from typing import NamedTuple

import torch

from ...kernels.sampling.keep_top import Kept
from .tree_on_device import TreeOnDevice


class Draft(NamedTuple):
    """Tokens at the nodes of trees and, for verifiers that compare distributions, the distributions they were sampled from."""

    tokens: torch.Tensor  # [B, N], node 0 is the root; -1: an empty node
    tree: TreeOnDevice
    scores: torch.Tensor | None = None  # [L, B, V]: a distribution is the softmax of scores / temperature
    temperature: torch.Tensor | None = None  # [B]; 0: the children are the likeliest tokens
    # [N] which of the L distributions the children of a node come from; any number for leaves
    distribution: torch.Tensor | None = None
    # bool [N] whether the token was sampled (unless the temperature is 0); if not, it is one of the likeliest
    sampled: torch.Tensor | None = None
    kept: Kept | None = None  # [L B] on a GPU, where distributions are cut: `scores` are already cut
    confidence: torch.Tensor | None = (
        None  # fp32 [B, D]: the drafter's own guess that a path is accepted to depth 1, 2, ...
    )

    def of_first(self, ranks):
        """The tokens, and the trees if they were grown, that rank 0 drafted. All ranks of a target call this together.

        Each rank drafts by itself, and the drafts should be equal. If they were not, sums over ranks would add different rows, and
        all ranks would draw wrong tokens. So all of them verify the same draft.
        """
        tree = self.tree
        own = (self.tokens, tree.depths, tree.parents, tree.ancestors) if tree.tree.grows else (self.tokens,)
        ranks.begin()
        first = ranks.gather(torch.cat([x.flatten() for x in own]))[0].clone()  # out of the ranks' own memory
        tokens, *grown = (part.view(x.shape) for part, x in zip(first.split([x.numel() for x in own]), own))
        return self._replace(tokens=tokens, tree=TreeOnDevice(tree.tree, *grown) if grown else tree)
