"""Drafting with block drafters: one pass gives the distributions of all depths (block_pass.py).

Without an edge they are all there is, and parallel.py makes drafts of them. With DSpark's edge they are corrected, level by level,
by the token that they follow: sequential.py walks the tree, but the head's layers run once.

Letters: B requests, n nodes of a level, K depths, V vocabulary, VD the draft's.
"""

import torch

from ....kernels.embedding import embed
from ....kernels.linear.linear import linear
from .block_pass import BlockPass
from .parallel import ParallelDrafter
from .sequential import SequentialDrafter


class BlockDrafter(BlockPass, ParallelDrafter):
    """Drafts with a BlockHead without an edge: arguments of BlockPass."""

    def distributions(self, batch, num_depths):
        return self.whole(self.marginals(batch, num_depths))

    def propose(self, batch, tree, processor=None):
        draft = super().propose(batch, tree, processor)
        if self.is_sure:
            draft = draft._replace(confidence=self.confidence(slice(None)).cumprod(0).t())
        self.states = None
        return draft


class EdgeDrafter(BlockPass, SequentialDrafter):
    """Drafts with a BlockHead with an edge: arguments of BlockPass. Nodes have no state but their token."""

    num_depths = by_depth = None

    def propose(self, batch, tree, processor=None):
        self.num_depths, self.sure = tree.max_depth, []
        draft = super().propose(batch, tree, processor)
        self.by_depth = self.states = None  # as large as K B rows of the target's scores, which come next
        return draft._replace(confidence=torch.cat(self.sure).cumprod(0).t()) if self.sure else draft

    def candidates(self, batch, widths):
        self.num_depths, self.sure = len(widths), []
        return super().candidates(batch, widths)

    def start(self, batch):
        self.by_depth = self.marginals(batch, self.num_depths)  # [K, B, VD]
        return self._after(batch.root[:, None], 0)

    def expand(self, batch, level, tokens, state):
        return self._after(tokens, level.depth)

    def _after(self, tokens, depth):
        """tokens [B, n] of nodes at a depth  ->  logits [n, B, V], state [B, n, 0]"""
        edge = self.head.markov_head
        rows = embed(tokens.t().flatten(), edge.markov_w1.weight)
        if self.is_sure:  # of the first node, whose children are the likeliest
            self.sure.append(self.confidence(slice(depth, depth + 1), rows[None, : len(tokens)]))
        correction = linear(rows, edge.markov_w2.weight).view(*tokens.t().shape, -1)
        return self.whole(self.by_depth[depth] + correction), correction.new_empty(*tokens.shape, 0)


def drafter_of(head, decoder, num_speculative_tokens, sampling="shared_noise"):
    """The drafter of a BlockHead: arguments of BlockPass."""
    kind = BlockDrafter if head.markov_head is None else EdgeDrafter
    return kind(head, decoder, num_speculative_tokens, sampling)


DRAFTER = drafter_of
