"""Draft trees as tensors: one for a whole batch, or one per request where they are grown.

Letters: B requests, N nodes, D the tree's greatest depth.
"""

from dataclasses import dataclass

import torch

from .tree import GrowingTree, Tree


@dataclass(frozen=True, eq=False)
class TreeOnDevice:
    """A tree on a device. A Tree has shape [N], for all requests; a GrowingTree [B, N], a row per request."""

    tree: Tree | GrowingTree
    depths: torch.Tensor  # [N] or [B, N]; zeros [N] for a GrowingTree that is not grown yet
    parents: torch.Tensor | None = None  # [N] or [B, N] in topological order, 0 for the root; None: not grown yet
    # [N, D + 1] or [B, N, D + 1] the node at each depth on the way from the root, itself last and repeated
    ancestors: torch.Tensor | None = None

    @classmethod
    def of(cls, tree, device):
        """A Tree on `device`; for a GrowingTree, only what is known before it is grown."""
        if tree.grows:
            return cls(tree, torch.zeros(tree.num_nodes, dtype=torch.int64, device=device))
        return cls(
            tree,
            torch.tensor(tree.depths, device=device),
            torch.tensor((0, *tree.parents[1:]), device=device),
            torch.tensor(tree.ancestors, device=device),
        )

    @property
    def num_nodes(self):
        return self.tree.num_nodes

    @property
    def max_depth(self):
        return self.tree.max_depth
