"""RMSNorm, alone and after a residual addition.

    rms_norm(x, w)        = round(x / sqrt(mean(x^2) + eps)) * w                           x [..., H], w [H] -> [..., H]
    add_rms_norm(x, r, w) : s = r + round(multiplier * round(x)); returns (rms_norm(s, w), s)

x of add_rms_norm may come in parts [S, M, H]: they are added in fp32, in order or in pairs, and rounded once. Sums run in fp32 over
one row at a time, one program per row with a block that depends on H alone. Not supported: LayerNorm's mean subtraction, biases.
"""

import torch

from .jit import jit, on_triton, tl, triton
from .linear.linear import empty_rows, sum_parts
from .overlap import await_previous, overlap, release_next


def rms_norm_reference(x, w, eps):
    """The formula in the dtype of x, fp32 at least.  [M, H], [H] -> [M, H]"""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * w


def add_rms_norm_reference(x, residual, w, eps, multiplier=1.0, in_pairs=False):
    """The formula in plain torch.  x [M, H] or [S, M, H], residual [M, H], w [H] -> two [M, H]"""
    residual = add_residual(x, residual, multiplier, in_pairs)
    return rms_norm_reference(residual, w, eps), residual


def add_residual(x, residual, multiplier=1.0, in_pairs=False):
    """residual + round(multiplier * round(x)) in plain torch.  x [M, H] or parts [S, M, H], residual [M, H] -> [M, H]"""
    if x.dim() == 3:
        if in_pairs and len(x) == 4:
            x = x[0::2] + x[1::2]
        total = x[0]
        for part in x[1:]:
            total = total + part
        x = total.to(residual.dtype)
    if multiplier != 1:
        x = (x.to(torch.promote_types(x.dtype, torch.float32)) * multiplier).to(x.dtype)
    return x + residual


def _norm(x, w, eps):
    """rms_norm_reference by the library, which computes the same bits in one call."""
    return torch.rms_norm(x, w.shape, None, eps) * w


@jit
def add_to_residual(x, h, total, at, inside, multiplier, SCALED: tl.constexpr):
    """A sum x in the residual's dtype, added to its rows h and stored to `total`.  -> h"""
    if SCALED:
        x = (x.to(tl.float32) * multiplier).to(h.dtype)
    h = (x.to(tl.float32) + h.to(tl.float32)).to(h.dtype)
    tl.store(total + at, h, mask=inside)
    return h


@jit
def store_normed(h, weight, normed, at, inside, width, eps):
    """The norm of one row h, 0 outside, to `normed`."""
    wide = h.to(tl.float32)
    mean = tl.div_rn(tl.sum(wide * wide), width.to(tl.float32))
    y = (wide * tl.rsqrt(mean + eps)).to(h.dtype)
    tl.store(normed + at, (y.to(tl.float32) * weight.to(tl.float32)).to(h.dtype), mask=inside)


@jit
def sum_in_pairs(parts, at, stride, inside, S: tl.constexpr):
    """2, 4 or 8 parts, added as a binary tree, neighbours first.  -> float32"""
    total = sum_parts(parts, at, stride, inside, 2, tl.float32)
    if S >= 4:
        total += sum_parts(parts + 2 * stride, at, stride, inside, 2, tl.float32)
    if S == 8:
        more = sum_parts(parts + 4 * stride, at, stride, inside, 2, tl.float32)
        total += more + sum_parts(parts + 6 * stride, at, stride, inside, 2, tl.float32)
    return total


@jit(do_not_specialize=["num_rows"])
def _add_rms_norm(
    parts, residual, w, normed, total, num_rows, width, eps, multiplier,
    S: tl.constexpr, PAIRS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row. With S = 0 nothing is added, and `parts`, `total` and `multiplier` are not used. PAIRS: four parts in pairs"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    await_previous(OVERLAP)
    release_next(OVERLAP)
    weight = tl.load(w + column, mask=inside, other=0.0)
    h = tl.load(residual + at, mask=inside, other=0.0)
    if S > 0:
        stride = num_rows.to(tl.int64) * width
        if PAIRS:
            x = sum_in_pairs(parts, at, stride, inside, S).to(h.dtype)
        else:
            x = sum_parts(parts, at, stride, inside, S, h.dtype)
        h = add_to_residual(x, h, total, at, inside, multiplier, SCALED)
    store_normed(h, weight, normed, at, inside, width, eps)


def num_warps(block):
    """Warps that sum a row of `block` lanes. They order the sum, so they depend on the width alone."""
    return min(max(block // 512, 1), 16)


def _launch(parts, residual, w, eps, multiplier, in_pairs=False):
    """parts [S, M, H] or None, residual [M, H]  ->  (normed, total), each [M, H]"""
    if w.dtype != residual.dtype:
        raise ValueError(f"the norm's weight must be {residual.dtype} like the rows, got {w.dtype}")
    rows, width = residual.shape
    residual, w = aligned(residual), aligned(w)
    normed = empty_rows(rows, width, residual.dtype, residual.device)
    total = None if parts is None else torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    if rows:
        _add_rms_norm[(rows,)](
            None if parts is None else aligned(parts), residual, w, normed, total, rows, width, eps, multiplier,
            0 if parts is None else parts.shape[0], in_pairs and parts.shape[0] == 4, multiplier != 1, block,
            num_warps=num_warps(block), enable_fp_fusion=False, **overlap(residual),
        )  # fmt: skip
    return normed, total


def aligned(x):
    """x itself, or a copy that starts at a multiple of 16 bytes: alignment may change the compiled order of a sum."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 and x.shape[-1] % 16 == 0 else x


def rms_norm(x, w, eps):
    """round(x / sqrt(mean(x^2) + eps)) * w over the last axis.  [..., H], [H] -> [..., H]; ValueError if they do not fit"""
    if x.shape[-1:] != w.shape:
        raise ValueError(f"rms_norm takes x [..., H] and w [H], got {tuple(x.shape)} and {tuple(w.shape)}")
    if not on_triton(x):
        return _norm(x, w, eps)
    return _launch(None, x.reshape(-1, x.shape[-1]), w, eps, 1.0)[0].view(x.shape)


def add_rms_norm(x, residual, w, eps, multiplier=1.0, in_pairs=False):
    """Residual addition and RMSNorm: (rms_norm(s, w), s) with s = residual + round(multiplier * round(x)).

    x [M, H], or parts [S, M, H] to be added in order (in_pairs: of four the first two, the last two, then both sums); residual
    [M, H], w [H] -> two [M, H] in the dtype of residual. Raises ValueError for shapes that do not fit.
    """
    if residual.dim() != 2 or x.shape[-2:] != residual.shape or x.dim() not in (2, 3) or residual.shape[1:] != w.shape:
        raise ValueError(
            "add_rms_norm takes x [M, H] or [S, M, H], residual [M, H] and w [H], got "
            f"{tuple(x.shape)}, {tuple(residual.shape)} and {tuple(w.shape)}"
        )
    if not on_triton(residual):
        residual = add_residual(x, residual, multiplier, in_pairs)
        return _norm(residual, w, eps), residual
    return _launch(x if x.dim() == 3 else x[None], residual, w, eps, multiplier, in_pairs)
