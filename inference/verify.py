"""Verifiers: the rule that turns (tree, drafted tokens, target) into an accepted path and one more token.

Pure functions on tensors; they know no cache, model or tokenizer. Lossless by construction: see docs/lossless.md.

Letters: B requests, N nodes, D the tree's greatest depth.
"""

import torch

VERIFIERS = ("strict",)


def strict(tree, tokens, target_tokens, depth_limit):
    """Follow the child that carries the target's own token; where there is none, emit that token and stop.

    tree: TreeTensors; tokens [B, N] drafted (node 0: the root, known); target_tokens [B, N]: the target's own token behind each
    node; depth_limit [B]: nodes deeper than this are not taken.
    Returns (path [B, D + 1] node at each depth, repeated behind its end; num_accepted [B]; bonus [B] the token behind the path).
    """
    accepted = torch.zeros_like(tokens, dtype=torch.bool)
    accepted[:, 0] = True
    matches = tokens == target_tokens[:, tree.parents]  # [B, N]; the root's own entry is not used
    matches &= tree.depths[None] <= depth_limit[:, None]
    for level in tree.levels:  # nodes of depth 1, 2, ...
        accepted[:, level] = matches[:, level] & accepted[:, tree.parents[level]]
    num_accepted = torch.where(accepted, tree.depths[None], 0).amax(1)  # [B]
    # Siblings carry different tokens, so one node at most is accepted per depth; argmax finds it, or the first of two equal ones.
    at_end = accepted & (tree.depths[None] == num_accepted[:, None])
    last = at_end.to(torch.uint8).argmax(1)  # [B]
    return tree.ancestors[last], num_accepted, target_tokens.gather(1, last[:, None]).squeeze(1)


class TreeTensors:
    """A topology on a device: parents and depths [N], ancestors [N, D + 1], nodes of each depth."""

    def __init__(self, tree, device):
        self.tree = tree
        self.num_nodes, self.max_depth = tree.num_nodes, tree.max_depth
        self.parents = torch.tensor((0, *tree.parents[1:]), device=device)
        self.depths = torch.tensor(tree.depths, device=device)
        self.ranks = torch.tensor(tree.ranks, device=device)
        self.ancestors = torch.tensor(tree.ancestors, device=device)
        self.levels = [
            torch.tensor([n for n in range(tree.num_nodes) if tree.depths[n] == d], device=device)
            for d in range(1, tree.max_depth + 1)
        ]
