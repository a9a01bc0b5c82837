"""Drafting with Medusa heads: head k proposes candidates for depth k + 1 from the feature of the last committed token.

The heads do not look at each other's tokens, so every node of depth d takes its candidate from one list: rank r means the
r-th best of head d - 1, whatever the parent. Under noise the candidates are the top of log q + G with the target's own G at that
position (shared noise): it proposes what the target is about to draw.

Letters: B requests, N nodes, K heads in use, H hidden, V vocabulary, L committed length.
"""

import torch

from ...heads.medusa import Medusa
from ...kernels.jit import on_triton
from ...kernels.linear import linear, linear_parts
from ...kernels.res_block import add_silu
from ...kernels.sample import top_tokens
from ..weights import pack_rows


class MedusaDrafter:
    """Drafts trees with Medusa heads.

    head: a Medusa module, read in place (a head in training is used as it is at the moment); lm_head_weight [V, H]: the target's.
    On a GPU the first blocks of all heads are packed into one product; the module's weights become views of it.
    """

    features = Medusa.features

    def __init__(self, head, lm_head_weight):
        self.head = head
        self.num_speculative_tokens = head.num_speculative_tokens
        self.lm_head_weight = lm_head_weight
        self.dtype = next(head.parameters()).dtype
        # A shared lm_head is used in the heads' dtype; where that is the target's own, no copy is made.
        self.shared_weight = lm_head_weight.to(self.dtype) if head.config.shared_lm_head else None
        self.packed = None
        if on_triton(lm_head_weight):
            self.packed = pack_rows([one.blocks[0].linear for one in head.heads])

    def logits(self, feature, num_heads):
        """Predictions of the first `num_heads` heads.  [B, H] -> [K, B, V]"""
        feature = feature.to(self.dtype)
        heads = self.head.heads[:num_heads]
        if self.packed is None:
            # Drafts need not be row-invariant: the library's products are faster on the CPU.
            return torch.stack([self.head.logits(feature, k, self.shared_weight) for k in range(num_heads)])
        rows = num_heads * feature.shape[1]
        weight, bias = (x[:rows] for x in self.packed)
        hidden = add_silu(feature, linear_parts(feature, weight, bias), num_heads)  # [K, B, H]
        for depth in range(1, self.head.config.num_layers):
            blocks = [head.blocks[depth].linear for head in heads]
            hidden = torch.cat([add_silu(x, linear_parts(x, b.weight, b.bias), 1) for x, b in zip(hidden, blocks)])
        if self.shared_weight is not None:
            return linear(hidden.flatten(0, 1), self.shared_weight).view(num_heads, feature.shape[0], -1)
        return torch.stack([linear(x, head.lm_head.weight) for x, head in zip(hidden, heads)])

    def candidates(self, batch, widths):
        """The best tokens of each depth, best first; the `widths` of narrower depths are filled up.

        batch: BatchRows; widths: how many per depth  ->  int64 [B, K, greatest width]
        """
        depth, width = len(widths), max(widths)
        logits = self.logits(batch.feature, depth)  # [K, B, V]
        # Head k drafts the token at L + 1 + k, with the noise that the target will draw it with.
        keys = batch.temperature, batch.seed, batch.sample, batch.committed + 1
        found = top_tokens(logits.flatten(0, 1), width, *keys)
        return found.view(depth, -1, width).transpose(0, 1)

    def propose(self, batch, tree):
        """Tokens of all nodes.  batch: BatchRows, tree: TreeTensors  ->  [B, N]"""
        found = self.candidates(batch, tree.tree.widths).flatten(1)  # [B, K width]
        return torch.cat((batch.root[:, None], found[:, tree.columns]), 1)
