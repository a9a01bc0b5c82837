"""lm_heads of a head's own, as drafters multiply by them: whole, in 8 bits, or divided by tokens among the ranks of the target.

    place = LMHeads(ranks, asked)       # asked: draft_tensor_parallel_size
    lm_head = place(weight)             # a WholeLMHead, or a DividedLMHead
    lm_head.product(x)                  # [M, H] -> [M, V], the same bits either way

Ranks that divide an lm_head read their tokens' rows of it, and gather the scores. Each holds the whole weight: its rows are a view.

Letters: M rows, H hidden, V vocabulary, B requests, K heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....kernels.jit import on_triton
from ....kernels.linear.float8_linear import Float8Weight, float8_linear
from ....kernels.linear.linear import linear, pack_weight
from ...models.blocks import in_8_bits
from ...models.divided_weight import DividedWeight, is_small


class WholeLMHead(NamedTuple):
    """An lm_head [V, H] that every rank multiplies by itself."""

    weight: torch.Tensor

    def product(self, x, out=None):
        """[M, H] -> [M, V], in `out` if it is given, on a GPU"""
        return linear(x, self.weight, out=out)

    def frozen(self):
        """The same in the layout that the device reads fastest, for a weight that never changes."""
        return WholeLMHead(pack_weight(self.weight))

    def in_8_bits(self):
        """The same with its weight rounded to 8 bits: on a GPU a Float8LMHead."""
        weight = in_8_bits(self.weight)
        return Float8LMHead(weight) if isinstance(weight, Float8Weight) else WholeLMHead(weight).frozen()


class Float8LMHead(NamedTuple):
    """An lm_head [V, H] of 8 bits that every rank multiplies by itself, on a GPU."""

    weight: Float8Weight

    def product(self, x, out=None):
        """[M, H] -> [M, V], in `out` if it is given"""
        return float8_linear(x, self.weight, out=out)


class DividedLMHead(NamedTuple):
    """An lm_head of which this rank multiplies by some rows."""

    weight: DividedWeight

    def product(self, x):
        """[M, H] -> [M, V]. All ranks call this together."""
        self.weight.ranks.begin()
        return self.weight.product(x)


def products(lm_heads, hidden):
    """The scores of several heads, each of its own rows: of divided ones in one gather.  [K, B, H] -> [K, B, V]"""
    first = lm_heads[0]
    if not isinstance(first, DividedLMHead):
        if not on_triton(hidden):
            return torch.stack([one.product(x) for x, one in zip(hidden, lm_heads)])
        found = hidden.new_empty(*hidden.shape[:2], first.weight.shape[0])
        if found[0].nbytes % 16:  # kernels are compiled for aligned tensors
            return torch.stack([one.product(x) for x, one in zip(hidden, lm_heads)])
        for x, one, out in zip(hidden, lm_heads, found):
            one.product(x, out)
        return found
    weight = first.weight
    weight.ranks.begin()
    parts = [linear(x, one.weight.w, splits=weight.splits) for x, one in zip(hidden, lm_heads)]
    return weight.joined(torch.cat(parts)).view(len(parts), hidden.shape[1], -1)


@dataclass(frozen=True)
class LMHeads:
    """How ranks take lm_heads.

    ranks: of the target; asked: draft_tensor_parallel_size: 1: whole, ranks.size: divided; None: whichever takes less time by the
    bytes that a rank reads less
    """

    ranks: object
    asked: int | None = None

    def __call__(self, weight):
        """A WholeLMHead or DividedLMHead of a weight [V, H]."""
        size = self.ranks.size
        whole = is_small(weight.nbytes * (size - 1) / size) if self.asked is None else self.asked == 1
        return WholeLMHead(weight) if whole else DividedLMHead(DividedWeight.of(weight, self.ranks))
