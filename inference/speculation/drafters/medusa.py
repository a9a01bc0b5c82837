"""Drafting with Medusa heads: head k proposes candidates for depth k + 1 from the feature of the last committed token.

The heads do not look at each other's tokens, so all nodes of depth d share the distribution of head d - 1. For the verifier
`strict` they also share one list of candidates: rank r is the r-th best token, whatever the parent. With a temperature the order is
that of log q + G, with the target's own G at that position (shared noise), so the heads propose what the target is about to draw.
For the ratio rules every node draws its own children (draw_nodes.py), or takes the likeliest.

Letters: B requests, N nodes, K heads in use, H hidden, V vocabulary, L committed length.
"""

import torch

from ....kernels.jit import on_triton
from ....kernels.linear.linear import linear, linear_parts, pack_weight
from ....kernels.linear.res_block import add_silu
from ....kernels.sampling.sample import top_tokens
from ...models.weights import pack_rows
from ..draft import Draft
from ..draw_nodes import NodeDraws
from .drafter import Drafter


class MedusaDrafter(Drafter):
    """Drafts trees with Medusa heads.

    head: a Medusa module, read in place (updates of a head in training apply at once); decoder: the target's Decoder;
    sampling: a way of draft_sampling.py.
    On a GPU, and where the head is frozen, the first blocks of all heads are packed into one product; the module's weights become
    views of it.
    """

    def __init__(self, head, decoder, num_speculative_tokens=None, sampling="shared_noise"):
        self.head, self.sampling = head, sampling
        self._draws, self._columns = {}, {}  # per tree
        self.num_speculative_tokens = head.num_speculative_tokens
        self.dtype = next(head.parameters()).dtype
        # A shared lm_head is used in the heads' dtype; if that is the target's dtype, no copy is made.
        self.shared_weight = decoder.whole_lm_head().to(self.dtype) if head.config.shared_lm_head else None
        self.packed = self.lm_heads = None
        if on_triton(decoder.lm_head):  # where weights are laid out as they are: updates in training still apply
            self.freeze()

    def freeze(self):
        """Pack the first blocks, and lay lm_heads out for `linear`."""
        self.packed = pack_rows([one.blocks[0].linear for one in self.head.heads])
        if self.shared_weight is not None:
            self.lm_heads = [pack_weight(self.shared_weight)]
        else:
            self.lm_heads = [pack_weight(one.lm_head.weight) for one in self.head.heads]

    def logits(self, feature, num_heads):
        """Predictions of the first `num_heads` heads.  [B, H] -> [K, B, V]"""
        feature = feature.to(self.dtype)
        if self.packed is None:
            # Drafts need not be row-invariant, and the library's products are faster on the CPU.
            return torch.stack([self.head.logits(feature, k, self.shared_weight) for k in range(num_heads)])
        rows = num_heads * feature.shape[1]
        weight, bias = self.packed.weight[:rows], self.packed.bias[:rows]
        hidden = add_silu(feature, linear_parts(feature, weight, bias), num_heads)  # [K, B, H]
        for depth in range(1, self.head.config.num_layers):
            blocks = [head.blocks[depth].linear for head in self.head.heads[:num_heads]]
            hidden = torch.cat([add_silu(x, linear_parts(x, b.weight, b.bias), 1) for x, b in zip(hidden, blocks)])
        if self.shared_weight is not None:
            return linear(hidden.flatten(0, 1), self.lm_heads[0]).view(num_heads, feature.shape[0], -1)
        return torch.stack([linear(x, weight) for x, weight in zip(hidden, self.lm_heads)])

    def candidates(self, batch, widths):
        """The best tokens of each depth, best first: see Drafter.candidates. Heads do not look at each other's choices."""
        return self._candidates(batch, self.logits(batch.feature, len(widths)), batch.temperature, max(widths))

    def _candidates(self, batch, scores, temperature, width):
        """scores [K, B, V], temperature [B]  ->  int64 [B, K, width]"""
        # Head k drafts the token at L + 1 + k, with the noise of the target's own draw there.
        keys = temperature, batch.seed, batch.sample, batch.committed + 1
        return top_tokens(scores.flatten(0, 1), width, *keys).view(len(scores), -1, width).transpose(0, 1)

    def propose(self, batch, tree, processor=None):
        """Tokens of all nodes; their distributions too unless noise is shared: see Drafter.propose."""
        scores, temperature, kept = self.logits(batch.feature, tree.max_depth), batch.temperature, None
        if processor is not None:
            scores, temperature, kept = processor(scores, torch.arange(len(scores), device=scores.device))
        width = tree.tree.width
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

    def _columns_of(self, tree):
        """Place of each node but the root among the candidates [D, W], flattened; W is the tree's width.  -> [N - 1]"""
        if tree not in self._columns:
            ranks = torch.tensor(tree.tree.ranks[1:], device=tree.depths.device)
            self._columns[tree] = (tree.depths[1:] - 1) * tree.tree.width + ranks
        return self._columns[tree]


DRAFTER = MedusaDrafter
