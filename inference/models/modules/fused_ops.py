"""Operations that look into what is deferred (deferred.py): they make one kernel of several, or remember what could become one.

    residual + product, then a norm          add_rms_norm, add_layer_norm: they add the product's parts, too
    silu(gate) * up of one product           gate_up_silu
    q, k, v of one product, then attention   rotary_kv_write (packed_heads.py), with norms of heads, rotation and scaling in between

Several linears that read the same rows are one product if their weights were packed (product_groups.py). What is met unpacked is
noted in `mode.wishes`, and every fused kernel in `mode.fused`: a pass must fuse what the trial fused, otherwise a row's bits would
depend on the pass that it is in.

Each takes (mode, function, *arguments of the operation) and gives its result, or NotImplemented: then it runs as any other.
"""

import functools

import torch

from ....kernels.layer_norm import add_layer_norm, layer_norm
from ....kernels.linear.gated_mlp import gate_up_silu
from ....kernels.rms_norm import add_rms_norm, rms_norm
from ....kernels.row_sum import row_sum
from ..divided_weight import DividedWeight
from .deferred import (
    Call,
    Deferred,
    Product,
    Sum,
    columns,
    computed,
    is_scaled_product,
    is_source,
    is_whole,
    is_whole_product,
)


def fused_linear(mode, function, x, w, b=None):
    return mode.product(x, w, b)


# --- sums and norms ---


def fused_add(mode, function, a, b, alpha=1):
    """A rotation, or a residual and what is added to it."""
    if alpha != 1 or not torch.is_tensor(a) or not torch.is_tensor(b):
        return NotImplemented
    rotation = _rotation(a, b) or _rotation(b, a)
    if rotation:
        return mode.defer(Call("rotated", function, (a, b), rotation))
    alike = a.shape == b.shape and a.dtype == b.dtype and a.is_floating_point() and a.dim() > 1
    if not alike or not a.is_contiguous() or not b.is_contiguous():
        return NotImplemented
    if _is_added(a) and not _is_added(b):
        a, b = b, a
    if is_source(a, Call) or (is_source(b, Call) and not _is_added(b)):
        return NotImplemented
    return mode.defer(Sum(function, a, b))


def _is_added(x):
    return is_whole_product(x) or is_scaled_product(x)


def _normed(mode, x, add_norm):
    """The norm of a sum in one kernel with the addition; None if x is no sum, or one that is known already."""
    if not is_source(x, Sum) or not is_whole(x):
        return None
    normed = x.source.normed(add_norm)
    if normed is None:
        return None
    mode.fused["add + norm"] += 1
    return normed.view(x.shape)


def fused_rms_norm(mode, function, x, shape, w=None, eps=None):
    mode.check_last("rms_norm", x, shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if w is None or w.dtype != x.dtype:
        return rms_norm_of_wide(computed(x), w, eps)

    def add_norm(parts, residual, multiplier):
        if residual.is_meta:
            return torch.empty_like(residual), torch.empty_like(residual)
        return add_rms_norm(parts, residual, w, eps, multiplier)

    normed = _normed(mode, x, add_norm)
    if normed is not None:
        return normed
    norm = functools.partial(_rms_norm, eps=eps)
    if is_source(x, Product) and x.dim() == 4:  # of heads, which may go on to attention
        return mode.defer(Call("rms_norm", norm, (x, w), eps))
    return norm(computed(x), w)


def _rms_norm(x, w, eps):
    return torch.empty_like(x) if x.is_meta else rms_norm(x, w, eps)


def rms_norm_of_wide(x, w, eps):
    """RMSNorm whose weight is of another dtype, or missing."""
    wide = (x if x.dtype == torch.float64 else x.float()).reshape(-1, x.shape[-1])
    normed = (wide * torch.rsqrt(row_sum(wide * wide) / x.shape[-1] + eps)[:, None]).to(x.dtype).view(x.shape)
    return normed if w is None else normed * w


def fused_layer_norm(mode, function, x, shape, w=None, b=None, eps=1e-5, cudnn_enable=True):
    mode.check_last("layer_norm", x, shape)

    def add_norm(parts, residual, multiplier):
        if residual.is_meta:
            return torch.empty_like(residual), torch.empty_like(residual)
        return add_layer_norm(parts, residual, w, b, eps)

    # This kernel knows no multiplier.
    scaled = is_source(x, Sum) and is_scaled_product(x.source.x)
    normed = None if scaled else _normed(mode, x, add_norm)
    if normed is not None:
        return normed
    x = computed(x)
    return torch.empty_like(x) if x.is_meta else layer_norm(x.reshape(-1, x.shape[-1]), w, b, eps).view(x.shape)


# --- gated MLPs ---


def fused_silu(mode, function, x):
    return mode.defer(Call("silu", mode.elementwise(function), (x,))) if is_source(x, Product) else NotImplemented


def fused_mul(mode, function, a, b):
    """silu(gate) * up; or heads times a number, or times cos or sin of their angles, which may go on to attention."""
    if isinstance(a, Deferred) and isinstance(b, Deferred):
        return _gated(mode, a, b) if is_source(a, Call, "silu") else _gated(mode, b, a)
    x, factor = (a, b) if isinstance(a, Deferred) else (b, a)
    if not (is_source(x, Product) or is_source(x, Call, "rms_norm") or is_source(x, Call, "rotate_half")):
        return NotImplemented
    if torch.is_tensor(factor):
        dims = zip(reversed(factor.shape), reversed(x.shape))
        if factor.dtype != x.dtype or factor.dim() > x.dim() or any(m not in (1, n) for m, n in dims):
            return NotImplemented
    return mode.defer(Call("mul", function, (x, factor)))


def _gated(mode, gate, up):
    """gate: of a silu, perhaps"""
    if not is_source(gate, Call, "silu") or not is_source(up, Product) or gate.views:
        return NotImplemented
    gate = gate.source.args[0]
    product, left, right = gate.source, columns(gate), columns(up)
    if left is None or right is None or gate.shape != up.shape:
        return NotImplemented
    if product is not up.source:
        mode.wish((gate, up))
        return NotImplemented
    width = product.w.shape[0] // 2
    if left != (0, width) or right != (width, width) or 2 * width != product.w.shape[0]:
        return NotImplemented
    mode.fused["gated"] += 1
    mode.gated.append(product.w)
    if product.rows.is_meta:
        return torch.empty(up.shape, dtype=up.dtype, device="meta")
    if isinstance(product.w, DividedWeight):
        return product.w.gated(product.rows, product.b).view(up.shape)
    return gate_up_silu(product.rows, product.w, product.b).view(up.shape)


# --- rotations of heads:  x * cos + rotate_half(x) * sin ---


def fused_neg(mode, function, x):
    if is_source(x, Product) or is_source(x, Call, "rms_norm"):
        return mode.defer(Call("neg", function, (x,)))
    return NotImplemented


def fused_cat(mode, function, tensors, dim=0):
    """(-x2, x1) of the halves x1, x2 of the last dimension."""
    if len(tensors) == 2 and is_source(tensors[0], Call, "rotated") and tensors[1].shape[dim] == 0:
        return tensors[0]  # no part of the head goes without rotation
    if len(tensors) != 2 or not is_source(tensors[0], Call, "neg") or not isinstance(tensors[1], Deferred):
        return NotImplemented
    first, second = tensors[1], tensors[0].source.args[0]
    half = first.outline
    if (
        dim % half.dim() != half.dim() - 1
        or tensors[0].views
        or second.source is not first.source
        or (half.shape, half.stride()) != (second.outline.shape, second.outline.stride())
        or half.stride(-1) != 1
        or second.outline.storage_offset() != half.storage_offset() + half.shape[-1]
    ):
        return NotImplemented
    both = half.as_strided((*half.shape[:-1], 2 * half.shape[-1]), half.stride())
    x = Deferred(first.source, both)
    return mode.defer(Call("rotate_half", _rotate_half(function), (x,)))


def _rotate_half(cat):
    def rotate_half(x):
        first, second = x.chunk(2, -1)
        return cat((-second, first), -1)

    return rotate_half


def _rotation(a, b):
    """(x, cos, sin) if a is x * cos and b rotate_half(x) * sin."""
    if not is_source(a, Call, "mul") or not is_source(b, Call, "mul") or a.views or b.views:
        return None
    (x, cos), (turned, sin) = a.source.args, b.source.args
    if (
        not is_source(turned, Call, "rotate_half")
        or turned.views
        or not torch.is_tensor(cos)
        or not torch.is_tensor(sin)
    ):
        return None
    same = turned.source.args[0]
    if x.source is not same.source or not same_view(x.outline, same.outline):
        return None
    return x, cos, sin


def same_view(a, b):
    """Whether two outlines of one source have the same elements in the same places."""
    strides = zip(a.shape, a.stride(), b.stride())
    return (
        a.shape == b.shape
        and a.storage_offset() == b.storage_offset()
        and all(size == 1 or m == n for size, m, n in strides)
    )


FUSED = {
    "linear": fused_linear,
    "add": fused_add,
    "rms_norm": fused_rms_norm,
    "layer_norm": fused_layer_norm,
    "silu": fused_silu,
    "mul": fused_mul,
    "neg": fused_neg,
    "cat": fused_cat,
}
