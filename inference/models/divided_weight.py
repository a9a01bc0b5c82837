"""A weight of which each rank multiplies some output features, and gathers those of all (modules/divided_products.py).

    weight = DividedWeight.of(whole, ranks)      # its rows are views of the whole
    weight.product(x, b)                         # [M, K] -> [M, N]: this rank's features, then those of all

A feature has the same bits whichever features are computed beside it, as long as the ranges of K are those of the whole weight.
Every rank computes equally many, a multiple of ALIGNMENT. Where the ranks do not divide them, the last ones compute some that
others compute, too: that needs no padding. Who gathers first in a pass calls `ranks.begin()` (transport.py).

Letters: M rows, N x K a weight, h stretches of features, n features of one rank in each, E experts, R ranks.
"""

from dataclasses import dataclass

import torch

from ...kernels.linear.gated_mlp import gate_up_silu
from ...kernels.linear.linear import linear
from ...kernels.linear.linear_table import num_splits
from .division import ALIGNMENT

# Bytes of a weight up to which every rank holds it whole: a gather and the copy after it take some 7 us, time to read 30 MB.
SMALL = 2**25


def is_small(num_bytes):
    """Whether so many bytes are not worth a gather."""
    return num_bytes <= SMALL


def rows_of_rank(features, rank, size):
    """Which of so many features are a rank's: range(first, end)."""
    count = min(-(-features // (size * ALIGNMENT)) * ALIGNMENT, features)
    first = min(rank * count, features - count)
    return range(first, first + count)


def new_of_ranks(features, size):
    """Which of each rank's features no rank before it has (slices)."""
    end = 0
    for rank in range(size):
        rows = rows_of_rank(features, rank, size)
        yield slice(end - rows.start, None)
        end = rows.stop


@dataclass(frozen=True, eq=False)
class DividedWeight:
    """This rank's features of a weight, or of each expert's.

    w: [h n, K], or [E, h n, K]; shape: (N, K) of the whole; stretches: h, 2 where gate and up lie one after the other and a rank
    has the same features of both; ranks: a group of transport.py
    """

    w: torch.Tensor
    shape: tuple
    stretches: int
    ranks: object

    @classmethod
    def of(cls, whole, ranks):
        """The part of a weight [N, K] that this rank multiplies, a view of it."""
        rows = rows_of_rank(len(whole), ranks.rank, ranks.size)
        return cls(whole[rows.start : rows.stop], tuple(whole.shape), 1, ranks)

    @property
    def dtype(self):
        return self.w.dtype

    @property
    def splits(self):
        """Ranges of K on a GPU: those of the whole weight."""
        return num_splits(*self.shape)

    @property
    def rows(self):
        """This rank's features of a stretch: range(first, end)."""
        return rows_of_rank(self.shape[0] // self.stretches, self.ranks.rank, self.ranks.size)

    def bias(self, b):
        """This rank's part of a bias.  [.., N] or None -> [.., h n]"""
        if b is None:
            return None
        held = b.unflatten(-1, (self.stretches, -1))[..., self.rows.start : self.rows.stop]
        return held.flatten(-2).contiguous()

    def product(self, x, b=None, out=None):
        """x W^T + b of all features, in `out` if given.  [M, K], [N] -> [M, N]"""
        slot = self.ranks.slot((len(x), len(self.w)), x.dtype)
        return self.joined(linear(x, self.w, self.bias(b), slot, self.splits), out=out)

    def gated(self, x, b=None):
        """silu(gate) * up of all features.  [M, K], [N] -> [M, N / 2]"""
        return self.joined(gate_up_silu(x, self.w, self.bias(b), splits=self.splits), stretches=1)

    def joined(self, part, stretches=None, out=None):
        """All features of every row.  [M, h n] -> [M, N]; stretches: those of the part, where it has fewer than the weight"""
        stretches, width = stretches or self.stretches, self.shape[0] // self.stretches
        parts = self.ranks.gather(part).unflatten(2, (stretches, -1))  # [R, M, h, n]
        own = [found[..., new] for found, new in zip(parts, new_of_ranks(width, self.ranks.size))]
        into = None if out is None else out.view(len(out), stretches, width)
        return torch.cat(own, 2, out=into).flatten(1)
