"""Verifiers: the rule that turns (tree, drafted tokens, target) into an accepted path and one more token.

A verifier is called with (tree, tokens [B, N], target_tokens [B, N], batch) and answers (path [B, D + 1], num_accepted [B], bonus
[B]); it knows no cache, model or tokenizer. tree: TreeTensors; batch: slots.BatchRows. `strict` is lossless by construction: see
docs/lossless.md. `synthetic` is not: it accepts by given rates, to measure the engine's speed without a trained head.

Letters: B requests, N nodes, D the tree's greatest depth.
"""

import torch

from ..kernels.verify_strict import verify_strict
from ..kernels.verify_synthetic import verify_synthetic

VERIFIERS = ("strict", "synthetic")


def strict(tree, tokens, target_tokens, batch):
    """Follow the child that carries the target's own token; where there is none, emit that token and stop.

    Nodes deeper than the tokens that the request may still emit are not taken.
    """
    limit = batch.remaining - 1
    return verify_strict(tree.parents, tree.depths, tokens, target_tokens, limit, tree.max_depth)


class Synthetic:
    """Accepts depth d with probability rates[d - 1] (unconditional, so falling), whatever the tokens are.

    The accepted path runs through the first candidate of every depth. Draws depend on a request's seed and position.
    """

    def __init__(self, rates, device):
        numbers = isinstance(rates, list | tuple) and all(isinstance(rate, int | float) for rate in rates)
        if not numbers or not rates or not 0 <= min(rates) <= max(rates) <= 1 or sorted(rates)[::-1] != list(rates):
            raise ValueError(
                f"acceptance_rates are the unconditional rates of position 1, 2, ...: falling, from 0 to 1; got {rates!r}"
            )
        self.rates = torch.tensor(rates, dtype=torch.float64, device=device)

    def __call__(self, tree, tokens, target_tokens, batch):
        path = tree.ancestors[tree.deepest]
        return verify_synthetic(path, self.rates, batch.seed, batch.committed, batch.remaining, target_tokens)


def rates_for_length(acceptance_length, depth):
    """Falling rates r, r^2, ... r^depth whose sum plus one is `acceptance_length`. ValueError if no r in [0, 1] does it."""
    if not isinstance(acceptance_length, int | float) or not 1 <= acceptance_length <= depth + 1:
        raise ValueError(
            f"acceptance_length must be from 1 to {depth + 1} tokens per step with drafts {depth} deep, got {acceptance_length!r}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 + sum(middle**i for i in range(1, depth + 1)) < acceptance_length:
            low = middle
        else:
            high = middle
    return [high**i for i in range(1, depth + 1)]


class TreeTensors:
    """A topology on a device: parents, depths and ranks [N], ancestors [N, D + 1]; `deepest`: the first node of depth D.

    columns [N - 1]: where each node but the root stands among candidates [D, W] laid out flat, W the greatest of the tree's widths.
    """

    def __init__(self, tree, device):
        self.tree = tree
        self.num_nodes, self.max_depth = tree.num_nodes, tree.max_depth
        self.parents = torch.tensor((0, *tree.parents[1:]), device=device)
        self.depths = torch.tensor(tree.depths, device=device)
        self.ranks = torch.tensor(tree.ranks, device=device)
        self.ancestors = torch.tensor(tree.ancestors, device=device)
        self.deepest = tree.depths.index(tree.max_depth)
        self.columns = (self.depths[1:] - 1) * max(tree.widths, default=0) + self.ranks[1:]
