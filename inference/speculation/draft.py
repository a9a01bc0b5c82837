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
