"""Drafting with block drafters: one pass gives the distributions of all depths (block_pass.py).

Without a correction they are all there is, and parallel.py makes drafts of them. DSpark's edge and DFlash2's selector correct them,
level by level, by the token that they follow: sequential.py walks the tree, but the head's layers run once. A selector's
distribution is over a depth's likeliest tokens alone.

Letters: B requests, n nodes of a level, K depths, H hidden, V vocabulary, VD the draft's, r rank, C candidates.
"""

from typing import NamedTuple

import torch

from ....kernels.embedding import embed
from ....kernels.linear.linear import linear
from ....kernels.row_sum import row_sum
from ....kernels.sampling.sample import top_tokens
from .block_pass import BlockPass
from .parallel import ParallelDrafter
from .sequential import SequentialDrafter


class BlockDrafter(BlockPass, ParallelDrafter):
    """Drafts with a BlockHead without a correction: arguments of BlockPass."""

    def distributions(self, batch, num_depths):
        return self.whole(self.marginals(batch, num_depths))

    def propose(self, batch, tree, processor=None):
        draft = super().propose(batch, tree, processor)
        if self.is_sure:
            draft = draft._replace(confidence=self.confidence(slice(None)).cumprod(0).t())
        self.kept = None
        return draft


class CorrectedDrafter(BlockPass, SequentialDrafter):
    """Drafts with a BlockHead with a correction: arguments of BlockPass. Nodes have no state but their token.

    by_depth: what `run_block` gave, while a draft is made.
    """

    num_depths = by_depth = None

    def run_block(self, batch):
        """What all depths need of the block's pass, before any correction.  batch: BatchRows"""
        raise NotImplementedError

    def corrected(self, tokens, depth):
        """The distributions after nodes of a depth.  tokens [n, B]  ->  logits [n, B, VD]"""
        raise NotImplementedError

    def propose(self, batch, tree, processor=None):
        self.num_depths, self.sure = tree.max_depth, []
        draft = super().propose(batch, tree, processor)
        self.by_depth = self.kept = None  # as large as K B rows of the target's scores, which come next
        return draft._replace(confidence=torch.cat(self.sure).cumprod(0).t()) if self.sure else draft

    def candidates(self, batch, widths):
        self.num_depths, self.sure = len(widths), []
        found = super().candidates(batch, widths)
        self.by_depth = self.kept = None
        return found

    def start(self, batch):
        self.by_depth = self.run_block(batch)
        return self._after(batch.root[:, None], 0)

    def expand(self, batch, level, tokens, state):
        return self._after(tokens, level.depth)

    def _after(self, tokens, depth):
        """tokens [B, n] of nodes at a depth  ->  logits [n, B, VD], state [B, n, 0]"""
        logits = self.corrected(tokens.t(), depth)
        return logits, logits.new_empty(*tokens.shape, 0)


class EdgeDrafter(CorrectedDrafter):
    """With DSpark's edge."""

    def run_block(self, batch):
        return self.marginals(batch, self.num_depths)  # [K, B, VD]

    def corrected(self, tokens, depth):
        edge = self.head.markov_head
        rows = embed(tokens.flatten(), edge.markov_w1.weight)
        if self.is_sure:  # of the first node, whose children are the likeliest
            self.sure.append(self.confidence(slice(depth, depth + 1), rows[None, : tokens.shape[1]]))
        correction = linear(rows, edge.markov_w2.weight).view(*tokens.shape, -1)
        return self.by_depth[depth] + correction


class Choices(NamedTuple):
    """What a selector needs of all depths."""

    tokens: torch.Tensor  # int64 [K, B, C] the candidates
    scores: torch.Tensor  # fp32 [K, B, C] by the slots alone
    gates: torch.Tensor  # [K, B, r] P h
    successors: torch.Tensor  # [K, B, C, r] the candidates' rows of B


class SelectorDrafter(CorrectedDrafter):
    """With DFlash2's selector."""

    @property
    def max_candidates(self):
        return self.head.max_candidates

    def run_block(self, batch):
        selector, states = self.head.candidate_selector, self.states(batch, self.num_depths)
        shape = states.shape[:2]
        tokens, scores = top_tokens(self.products(states).flatten(0, 1), selector.top_k, with_scores=True)
        scores = self.head.scaled(scores)  # which keeps their order
        gates = linear(states.flatten(0, 1).to(self.dtype), selector.hidden_projection.weight)
        successors = embed(tokens.flatten(), selector.successor_codebook)
        parts = tokens, scores, gates, successors.view(*tokens.shape, -1)
        return Choices(*(one.view(*shape, *one.shape[1:]) for one in parts))

    def candidates(self, batch, widths):
        """As Drafter.candidates; -1 where there are more than the selector chooses among."""
        found = super().candidates(batch, widths)
        found[..., self.max_candidates :] = -1
        return found

    def corrected(self, tokens, depth):
        among, scores, gates, successors = (one[depth] for one in self.by_depth)
        rows = embed(tokens.flatten(), self.head.candidate_selector.predecessor_codebook).view(*tokens.shape, -1)
        pairs = (rows * gates)[:, :, None] * successors  # [n, B, C, r]
        scores = scores + row_sum(pairs.flatten(0, 2)).view(pairs.shape[:-1])
        logits = scores.new_full((*tokens.shape, self.head.config.vocab_size), -torch.inf)
        return logits.scatter_(2, among.expand(scores.shape), scores)


def drafter_of(head, decoder, num_speculative_tokens, sampling="shared_noise"):
    """The drafter of a BlockHead: arguments of BlockPass."""
    if head.candidate_selector is not None:
        kind = SelectorDrafter
    else:
        kind = BlockDrafter if head.markov_head is None else EdgeDrafter
    return kind(head, decoder, num_speculative_tokens, sampling)


DRAFTER = drafter_of
