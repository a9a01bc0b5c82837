"""Drafters with their own keys and values: EAGLE's layer, a draft model.

The keys and values lie in the drafter's own cache, in pages of the same numbers as the target's: a request that holds a page of
one holds that of the other. Drafting writes after the committed positions, and these entries are overwritten. After every step
`advance` computes the emitted tokens anew, from the target's own features where the drafter reads any.

Letters: B requests, n nodes of a level, J = D + 1 tokens emitted at most, M rows, F width of the target's feature, S of the state.
"""

import torch

from ....kernels.attention.tree_attention import build_tree_index
from ...models.decoder import ForwardPass
from .sequential import SequentialDrafter


class OwnCacheDrafter(SequentialDrafter):
    """See above. Subclasses define kv_shape, state_shape, `shift`, `run`, `logits`.

    shift: the keys of the token at position x are at place x - 1 + shift, which is also its position for the rotation. The newest
    token's keys are computed when it is emitted, so drafting starts after L + shift places.
    """

    shift = 0

    def attach(self, kv):
        self.kv = kv

    def run(self, forward_pass, source, from_target):
        """The pass over M rows; writes keys and values.  source: features [M, F] of the target, or states [M, S]

        ->  states [M, S], and `normed` of them
        """
        raise NotImplementedError

    def newest(self, forward_pass, source, rows):
        """As `run` on features of the target, where only some rows' states are read.  rows [R] -> states [R, S]"""
        return self.run(forward_pass, source, from_target=True)[0][rows]

    def normed(self, state):
        """What `logits` reads of states.  [M, S] -> [M, S]"""
        return state

    def logits(self, normed):
        """[M, S] -> [M, VD]"""
        raise NotImplementedError

    def start(self, batch):
        return self.logits(self.normed(batch.feature))[None], batch.feature[:, None]

    def expand(self, batch, level, tokens, state):
        shape = dict(first=level.first - 1, depths=level.depths, ancestors=level.ancestors, is_chain=level.is_chain)
        forward_pass = self._forward_pass(batch, tokens, from_target=False, **shape)
        found = self.run(forward_pass, state.flatten(0, 1), from_target=False)
        state, normed = (x.view(*tokens.shape, -1) for x in found)
        by_node = normed.transpose(0, 1)  # [n, B, S]
        return self.logits(by_node.reshape(-1, state.shape[-1])).view(*by_node.shape[:2], -1), state

    def advance(self, batch, feature, emitted, num_accepted):
        depths = torch.arange(feature.shape[1], device=feature.device)
        shape = dict(first=0, depths=depths, ancestors=depths.expand(len(depths), -1))
        # Rows after the newest token lie after the committed ones: they are overwritten before they are read.
        forward_pass = self._forward_pass(batch, emitted[:, 1:], from_target=True, is_chain=True, **shape)
        newest = torch.arange(0, emitted[:, 1:].numel(), len(depths), device=feature.device) + num_accepted
        return self.newest(forward_pass, feature.flatten(0, 1), newest)

    def _forward_pass(self, batch, tokens, *, from_target, first, depths, ancestors, is_chain=False):
        """Rows [B, n] as nodes of a tree after the committed places; the first row's keys go to the tree's place `first`.

        tokens [B, n]; depths and ancestors as build_tree_index takes them; is_chain: the rows, and those written before them, are a
        chain
        """
        heads, dtype = self.kv_shape[1], self.kv_shape[3]
        below = batch.committed + self.shift if self.shift else batch.committed  # [B]
        first += self.shift
        num_nodes = len(batch.cache_rows) // len(batch.seats)
        if is_chain and not from_target and first < num_nodes:  # one row, whose place is a node's
            positions, places = (x[first][:, None] for x in batch.chain)
        else:
            places = batch.places(first, first + tokens.shape[1])  # [B, n]
            positions = below[:, None] + depths  # [B, n]
        if is_chain:  # the rows written before these are as good as committed
            ancestors = ancestors[:, : tokens.shape[1]]
            below, depths = positions[:, 0].contiguous(), ancestors[0]
        shape = dict(num_kv_heads=heads, dtype=dtype, is_chain=is_chain)
        index = build_tree_index(batch.block_table, below, depths, ancestors, **shape)
        return ForwardPass(
            tokens=tokens.flatten(), positions=positions.flatten(), cache_rows=places.flatten(), attention=index
        )

    def fill(self, forward_pass, feature):
        self.run(forward_pass, feature, from_target=True)
