"""Drafting all depths at once, for drafters whose distributions do not depend on the drafted tokens: one per depth.

All nodes of depth d share the distribution of depth d. For the verifier `strict` they also share one list of candidates: rank r is
the r-th best token, whatever the parent. With a temperature the order is that of log q + G, with the target's own G at that
position (shared noise), so the drafter proposes what the target is about to draw. For the ratio rules every node draws its own
children (draw_nodes.py), or takes the likeliest. A growing tree takes the nodes whose product of confidences along their path is
best, as sequential drafters' (DDTree, arXiv 2604.12989, up to the width of a depth).

Letters: B requests, N nodes, D the tree's depth, W its width, K depths, V vocabulary, L committed length.
"""

import torch

from ....kernels.sampling.sample import log_sum_exp, top_tokens
from ....kernels.speculation.dynamic_tree import Candidates, grow, prune
from ..draft import Draft
from ..draw_nodes import NodeDraws
from ..tree_on_device import TreeOnDevice
from .drafter import Drafter
from .levels import no_distributions


class ParallelDrafter(Drafter):
    """See above. sampling: a way of draft_sampling.py."""

    def __init__(self, sampling):
        self.sampling = sampling
        self._draws, self._columns = {}, {}  # per tree

    def distributions(self, batch, num_depths):
        """The distributions of the first depths.  batch: BatchRows  ->  logits [K, B, V]"""
        raise NotImplementedError

    def candidates(self, batch, widths):
        """The best tokens of each depth, best first: see Drafter.candidates. Depths do not look at each other's choices."""
        return self._candidates(batch, self.distributions(batch, len(widths)), batch.temperature, max(widths))

    def _candidates(self, batch, scores, temperature, width):
        """scores [K, B, V], temperature [B]  ->  int64 [B, K, width]"""
        # Depth k drafts the token at L + 1 + k, with the noise of the target's own draw there.
        keys = temperature, batch.seed, batch.sample, batch.committed + 1
        return top_tokens(scores.flatten(0, 1), width, *keys).view(len(scores), -1, width).transpose(0, 1)

    def propose(self, batch, tree, processor=None):
        """Tokens of all nodes; their distributions too unless noise is shared: see Drafter.propose."""
        scores, temperature, kept = self.distributions(batch, tree.max_depth), batch.temperature, None
        if processor is not None:
            scores, temperature, kept = processor(scores, torch.arange(len(scores), device=scores.device))
        width = tree.tree.width
        if tree.tree.grows:
            return self._grow(batch, tree, scores, temperature)
        if self.sampling == "shared_noise":
            found = self._candidates(batch, scores, temperature, width).flatten(1)  # [B, K width]
            return Draft(torch.cat((batch.root[:, None], found[:, self._columns_of(tree)]), 1), tree)
        if self.sampling == "greedy":
            found = top_tokens(scores.flatten(0, 1), width).view(tree.max_depth, -1, width)
            tokens = torch.cat((batch.root[:, None], found.transpose(0, 1).flatten(1)[:, self._columns_of(tree)]), 1)
            none = torch.zeros_like(tree.depths, dtype=torch.bool)
            of_depth = tree.depths.clamp(max=tree.max_depth - 1)
            return Draft(tokens, tree, scores, temperature, distribution=of_depth, sampled=none, kept=kept)
        if tree not in self._draws:
            self._draws[tree] = NodeDraws(tree, self.sampling)
        return self._draws[tree](batch, scores, temperature, kept)

    def _grow(self, batch, tree, scores, temperature):
        """As SequentialDrafter._grow: scores [K, B, V], temperature [B]. The nodes of a depth have the same candidates."""
        width, with_noise = tree.tree.width, self.sampling == "shared_noise"
        keys = (temperature, batch.seed, batch.sample, batch.committed + 1) if with_noise else ()
        tokens, best = top_tokens(scores.flatten(0, 1), width, *keys, with_scores=True)
        log_sums = log_sum_exp(scores.flatten(0, 1))
        offers = [x.view(*scores.shape[:2], *x.shape[1:]) for x in (tokens, best, log_sums)]  # [K, B, W] twice, [K, B]
        candidates, nodes = Candidates.empty(scores.shape[1], tree.max_depth, width, scores.device), None
        for depth in range(tree.max_depth):
            count = width if depth else 1
            of_nodes = (x[depth].expand(count, *x.shape[1:]) for x in offers)
            nodes = grow(candidates, nodes, *of_nodes, batch.temperature if with_noise else None)
        tokens, parents, depths, ancestors = prune(candidates, batch.root, tree.num_nodes)
        grown = TreeOnDevice(tree.tree, depths, parents, ancestors)
        if with_noise:
            return Draft(tokens, grown)
        # Nothing is sampled, so the verifier reads no distribution.
        return Draft(tokens, grown, None, None, *no_distributions(tree))

    def _columns_of(self, tree):
        """Place of each node but the root among the candidates [D, W], flattened; W is the tree's width.  -> [N - 1]"""
        if tree not in self._columns:
            ranks = torch.tensor(tree.tree.ranks[1:], device=tree.depths.device)
            self._columns[tree] = (tree.depths[1:] - 1) * tree.tree.width + ranks
        return self._columns[tree]
