"""The blocks of a decoder layer: they hold weights and constants and launch the fused kernels.

    layer = Layer.from_weights(weights, num_heads=32, num_kv_heads=8, rotary=rotary, eps=1e-5)
    x, residual = layer.input_norm(residual, parts)                 # adds the previous layer's partial sums
    parts, residual = layer(x, residual, forward_pass, layer_kv)

The last product of a block is not added up: its partial sums go straight into the norm after it. The decoder of the target and
EAGLE's drafters are made of the same blocks. Not here: files (weights.py), differences of architectures (architectures.py).

Where it says parts [S, M, H], several ranks may have PeerParts instead, which the norm after them takes as well.

Letters: M rows, H hidden, I intermediate, V vocabulary, N x K a weight, S parts of a product, HQ and HK query and key heads, D head
dimension, P positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...kernels.attention.attention_fold import EVERYTHING, AttentionOptions
from ...kernels.attention.rotary_kv_write import rotary_kv_write
from ...kernels.jit import on_triton
from ...kernels.linear.float8_linear import Float8Weight, float8_gate_up_silu, float8_parts
from ...kernels.linear.gated_mlp import gate_up_silu
from ...kernels.linear.linear import linear, linear_parts, pack_weight
from ...kernels.linear.linear_table import num_splits
from ...kernels.peer_norm import PeerParts, peer_add_rms_norm
from ...kernels.rms_norm import add_rms_norm, rms_norm


class Linear(NamedTuple):
    """A product; several of a model's may be packed into one."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None = None  # [N]
    splits: int | None = None  # ranges of K on a GPU, of a product with more features than these; None: by this shape

    in_pairs = False  # whether the norm adds four parts in pairs

    def parts(self, x):
        """Partial sums that the next kernel adds.  x [M, K] -> [S, M, N]"""
        return linear_parts(x, self.weight, self.bias, splits=self.splits)

    def gated(self, x):
        """silu of the first half of the features times the second half.  x [M, K] -> [M, N / 2]"""
        return gate_up_silu(x, self.weight, self.bias, splits=self.splits)

    def features(self, start, stop):
        """The product of some of its features, the same bits."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Linear(self.weight[start:stop], bias, self.splits or num_splits(*self.weight.shape))

    def packed(self):
        """The same with its weight in the layout that the device reads fastest, for one that never changes."""
        return self._replace(weight=pack_weight(self.weight))

    def in_8_bits(self):
        """The same with its weight rounded to 8 bits: on a GPU a Float8Linear, elsewhere a Linear of the rounded values."""
        weight = in_8_bits(self.weight)
        return Float8Linear(weight, self.bias) if isinstance(weight, Float8Weight) else Linear(weight, self.bias)

    @property
    def shape(self):
        """(N, K)"""
        return tuple(self.weight.shape)

    @property
    def nbytes(self):
        """Bytes of the weight."""
        return self.weight.nbytes


class Float8Linear(NamedTuple):
    """A product with a weight of 8 bits, of a drafter."""

    weight: Float8Weight  # [N, K]
    bias: torch.Tensor | None = None  # [N]

    def parts(self, x):
        """See Linear."""
        return float8_parts(x, self.weight, self.bias)

    def gated(self, x):
        """See Linear."""
        return float8_gate_up_silu(x, self.weight, self.bias)

    @property
    def nbytes(self):
        """Bytes of codes and scales."""
        return self.weight.nbytes


def in_8_bits(weight):
    """A weight [N, K] rounded to 8 bits: a Float8Weight on a GPU; elsewhere, where no bytes are saved, its values in its dtype."""
    rounded = Float8Weight.of(weight)
    return rounded if on_triton(weight) else rounded.widened(weight.dtype)


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights."""

    qkv: Linear  # [(HQ + 2 HK) D, K of what it reads]
    out: Linear  # [H, HQ D]
    gate_up: Linear  # [2 I, H]
    down: Linear  # [H, I]
    post_norm: torch.Tensor  # [H]
    input_norm: torch.Tensor | None = None  # [H]
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None  # [D]


@dataclass(frozen=True)
class Norm:
    """RMSNorm of the residual stream.

    multiplier: of the sums that are added to it first; in_pairs: whether four parts of them are added in pairs
    """

    weight: torch.Tensor  # [H]
    eps: float
    multiplier: float = 1.0
    in_pairs: bool = False

    def __call__(self, residual, parts=None):
        """Add the partial sums of a product (None: nothing) and norm.

        residual [M, H], parts [S, M, H] or PeerParts of several ranks  ->  normed [M, H], residual [M, H]
        """
        if parts is None:
            return rms_norm(residual, self.weight, self.eps), residual
        if isinstance(parts, PeerParts):
            return peer_add_rms_norm(parts, residual, self.weight, self.eps, self.multiplier)
        return add_rms_norm(parts, residual, self.weight, self.eps, self.multiplier, self.in_pairs)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: cos and sin of the angles of every position, fp32 or wider."""

    cos: torch.Tensor  # [P, D/2]
    sin: torch.Tensor  # [P, D/2]

    @classmethod
    def from_frequencies(cls, frequencies, scaling, *, num_positions, dtype, device):
        """frequencies [D/2]: angle per position of every pair; scaling: factor of cos and sin; dtype: of the model."""
        wide = torch.promote_types(dtype, torch.float32)
        # On the CPU, so that the bits are the same on every device.
        angles = torch.arange(num_positions)[:, None].to(wide) * frequencies.to(wide)
        return cls(*((table * scaling).to(device) for table in (angles.cos(), angles.sin())))

    @property
    def num_positions(self):
        return len(self.cos)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention over the paged cache, from the packed q, k, v product to the out product."""

    qkv: Linear  # [(HQ + 2 HK) D, K]
    out: Linear  # [H, HQ D]
    num_heads: int
    num_kv_heads: int
    rotary: Rotary
    eps: float  # of q_norm and k_norm
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None  # [D]
    options: AttentionOptions = EVERYTHING

    def __call__(self, x, forward_pass, layer_kv):
        """Writes keys and values.  x [M, K], forward_pass: ForwardPass, layer_kv [2, rows, D]  ->  parts [S, M, H]"""
        return self.out.parts(self.heads(x, forward_pass, layer_kv))

    def heads(self, x, forward_pass, layer_kv):
        """What the out product reads; writes keys and values.  -> [M, HQ D]"""
        q = self._rotated(self.qkv.parts(x), self.num_heads, forward_pass, layer_kv)  # [M, HQ, D]
        return forward_pass.attention.attend(q, layer_kv, self.options).flatten(1)

    def write_keys(self, x, forward_pass, layer_kv):
        """Keys and values alone, the bits that a whole pass writes.  x [M, K], layer_kv [2, rows, D]"""
        parts = self.features_of_keys(layer_kv.shape[-1]).parts(x)
        self._rotated(parts, 0, forward_pass, layer_kv)

    def features_of_keys(self, head_dim):
        """The Linear of keys and values alone."""
        return self.qkv.features(self.num_heads * head_dim, self.qkv.shape[0])

    def _rotated(self, parts, num_heads, forward_pass, layer_kv):
        """The rotated queries of so many heads; keys and values go into the cache.  parts [S, M, .] -> [M, num_heads, D]"""
        return rotary_kv_write(
            parts,
            positions=forward_pass.positions,
            cos=self.rotary.cos,
            sin=self.rotary.sin,
            cache_rows=forward_pass.cache_rows,
            layer_kv=layer_kv,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            q_norm=self.q_norm if num_heads else None,
            k_norm=self.k_norm,
            eps=self.eps,
            shared=forward_pass.shared,
        )


@dataclass(frozen=True)
class GatedMLP:
    """down(SiLU(gate x) * up x)."""

    gate_up: Linear  # [2 I, H]
    down: Linear  # [H, I]

    def __call__(self, x):
        """x [M, H] -> parts [S, M, H]"""
        return self.down.parts(self.gate_up.gated(x))

    def in_8_bits(self):
        """The same with weights of 8 bits."""
        return GatedMLP(self.gate_up.in_8_bits(), self.down.in_8_bits())

    @property
    def nbytes(self):
        """Bytes of the weights."""
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True)
class Layer:
    """Attention and MLP with their residuals. The caller applies input_norm; None if it builds the input itself."""

    input_norm: Norm | None
    attention: Attention
    post_norm: Norm
    mlp: GatedMLP

    @classmethod
    def from_weights(cls, weights, *, eps, residual_multiplier=1.0, **attention):
        """A Layer of LayerWeights; attention: heads, rotary and options, as Attention has them."""
        input_norm = weights.input_norm
        return cls(
            input_norm=None
            if input_norm is None
            else Norm(input_norm, eps, residual_multiplier, weights.down.in_pairs),
            attention=Attention(
                qkv=weights.qkv, out=weights.out, q_norm=weights.q_norm, k_norm=weights.k_norm, eps=eps, **attention
            ),
            post_norm=Norm(weights.post_norm, eps, residual_multiplier, weights.out.in_pairs),
            mlp=GatedMLP(weights.gate_up, weights.down),
        )

    def __call__(self, x, residual, forward_pass, layer_kv):
        """The layer over M rows; writes their keys and values.

        x [M, K]: what q, k and v read; residual [M, H]; layer_kv [2, rows, D]
        ->  parts [S, M, H] that are still to be added, residual [M, H]
        """
        return self.after_heads(self.attention.heads(x, forward_pass, layer_kv), residual)

    def after_heads(self, heads, residual):
        """The rest of the layer, which looks at no other row.  heads [M, HQ D], residual [M, H]  ->  parts, residual"""
        x, residual = self.post_norm(residual, self.attention.out.parts(heads))
        return self.mlp(x), residual


def lm_head_logits(hidden, weight, divisor=1.0, out=None, splits=None):
    """hidden [M, H], weight [V, H] -> [M, V], in the model's dtype on a GPU (in `out` if given), in fp32 at least on the CPU

    splits: see Linear
    """
    return scaled_logits(linear(hidden, weight, out=out, splits=splits), divisor, in_place=out is not None)


def scaled_logits(logits, divisor, in_place=False):
    """Logits of a target that divides them, in the dtype that they are read in.  [M, V] -> [M, V]"""
    if divisor != 1:
        logits = logits.div_(divisor) if in_place else logits / divisor
    return widened(logits)


def widened(logits):
    """Logits in the dtype that they are read in: on a GPU the model's, on the CPU fp32 at least."""
    return logits if logits.is_cuda or logits.dtype == torch.float64 else logits.float()
