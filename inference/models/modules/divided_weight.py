"""A weight of which each rank holds some output features, as a product takes it (divided_products.py divides a module).

    weight.product(x, b)       # [M, K] -> [M, N]: this rank's features, then those of all

Letters: M rows, N x K a weight, h stretches of features, n features of one rank in each, E experts, R ranks.
"""

from dataclasses import dataclass

import torch

from ....kernels.linear.gated_mlp import gate_up_silu
from ....kernels.linear.linear import linear
from ....kernels.linear.linear_table import num_splits


@dataclass(frozen=True, eq=False)
class DividedWeight:
    """This rank's features of a weight, or of each expert's.

    w: [h n, K], or [E, h n, K]; shape: (N, K) of the whole; stretches: h, 2 where gate and up lie one after the other and a rank
    has the same features of both; division: a FeatureDivision
    """

    w: torch.Tensor
    shape: tuple
    stretches: int
    division: object

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
        return self.division.rows_of(self.shape[0] // self.stretches)

    def bias(self, b):
        """This rank's part of a bias.  [.., N] or None -> [.., h n]"""
        if b is None:
            return None
        held = b.unflatten(-1, (self.stretches, -1))[..., self.rows.start : self.rows.stop]
        return held.flatten(-2).contiguous()

    def product(self, x, b=None, out=None):
        """x W^T + b of all features, in `out` if given.  [M, K], [N] -> [M, N]"""
        slot = self.division.ranks.slot((len(x), len(self.w)), x.dtype)
        return self.joined(linear(x, self.w, self.bias(b), slot, self.splits), out=out)

    def gated(self, x, b=None):
        """silu(gate) * up of all features.  [M, K], [N] -> [M, N / 2]"""
        return self.joined(gate_up_silu(x, self.w, self.bias(b), splits=self.splits), stretches=1)

    def joined(self, part, stretches=None, out=None):
        """All features of every row.  [M, h n] -> [M, N]; stretches: those of the part, where it has fewer than the weight"""
        stretches, width = stretches or self.stretches, self.shape[0] // self.stretches
        parts = self.division.ranks.gather(part).unflatten(2, (stretches, -1))  # [R, M, h, n]
        own = [found[..., new] for found, new in zip(parts, self.division.new_of_ranks(width))]
        into = None if out is None else out.view(len(out), stretches, width)
        return torch.cat(own, 2, out=into).flatten(1)
