"""Drafting with Medusa heads: head k proposes candidates for depth k + 1 from the feature of the last committed token.

The heads do not look at each other's tokens: how trees are made of their distributions is in parallel.py.

Letters: B requests, K heads in use, H hidden, V vocabulary.
"""

import torch

from ....kernels.jit import on_triton
from ....kernels.linear.linear import linear_parts
from ....kernels.linear.res_block import add_silu
from ...models.weights import pack_rows
from .drafter import free_weights
from .lm_heads import WholeLMHead, products
from .parallel import ParallelDrafter


class MedusaDrafter(ParallelDrafter):
    """Drafts trees with Medusa heads.

    head: a Medusa module, read in place (updates of a head in training apply at once, but not to what is quantised); decoder: the
    target's Decoder; sampling: a way of draft_sampling.py.
    On a GPU, and where the head is frozen, the first blocks of all heads are packed into one product; the module's weights become
    views of it.
    """

    can_quantise = True

    def __init__(self, head, decoder, num_speculative_tokens=None, sampling="shared_noise"):
        super().__init__(sampling)
        self.head = head
        self.num_speculative_tokens = head.num_speculative_tokens
        self.dtype = next(head.parameters()).dtype
        # A shared lm_head is used in the heads' dtype; if that is the target's dtype, no copy is made.
        self.shared_weight = decoder.whole_lm_head().to(self.dtype) if head.config.shared_lm_head else None
        self.packed = self.lm_heads = None  # WholeLMHead or DividedLMHead of each head, one if it is shared
        if on_triton(decoder.lm_head):  # where weights are laid out as they are: updates in training still apply
            self.freeze()

    def freeze(self):
        """Pack the first blocks, and lay lm_heads out for `linear`."""
        self._pack_blocks()
        self.lm_heads = [WholeLMHead(weight).frozen() for weight in self._weights()]

    def quantise(self, release):
        """Round the lm_heads: all that drafts read, but the blocks."""
        self._pack_blocks()
        self.lm_heads, saved = [], 0
        for k, weight in enumerate(self._weights()):  # one at a time, so that few are there twice
            self.lm_heads.append(WholeLMHead(weight).in_8_bits())
            saved += weight.nbytes - self.lm_heads[k].weight.nbytes
            if release and self.shared_weight is None:
                free_weights([self.head.heads[k].lm_head])
        self.saved_bytes = {"first": saved}

    def place_lm_heads(self, lm_heads):
        self._pack_blocks()
        self.lm_heads = [lm_heads(weight) for weight in self._weights()]

    def _pack_blocks(self):
        """Make one product of all first blocks."""
        self.packed = pack_rows([one.blocks[0].linear for one in self.head.heads])

    def _weights(self):
        if self.shared_weight is not None:
            return [self.shared_weight]
        return [one.lm_head.weight for one in self.head.heads]

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
            return self.lm_heads[0].product(hidden.flatten(0, 1)).view(num_heads, feature.shape[0], -1)
        return products(self.lm_heads[:num_heads], hidden)

    def distributions(self, batch, num_depths):
        return self.logits(batch.feature, num_depths)


DRAFTER = MedusaDrafter
