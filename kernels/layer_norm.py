"""LayerNorm, alone and after a residual addition.

    layer_norm(x, w, b)        = (x - mean) / sqrt(variance + eps) * w + b, rounded once     x [M, H], w and b [H] or None -> [M, H]
    add_layer_norm(x, r, w, b) : s = r + round(x); returns (layer_norm(s, w, b), s)

x of add_layer_norm may come in parts [S, M, H]: they are added in order in fp32 and rounded once. Sums run in fp32 over one row at
a time: on a GPU one program per row, with a block and warps that depend on H alone, on the CPU as a tree of halves (row_sum.py).
"""

import torch

from .jit import jit, on_triton, tl, triton
from .linear.linear import empty_rows, sum_parts
from .overlap import await_previous, overlap, release_next
from .rms_norm import add_residual, aligned, num_warps
from .row_sum import row_sum_reference


def layer_norm_reference(x, w, b, eps):
    """The formula in fp32 (fp64), rounded once.  [M, H] -> [M, H]"""
    wide = x if x.dtype == torch.float64 else x.float()
    width = x.shape[-1]
    centred = wide - (row_sum_reference(wide) / width)[:, None]
    variance = row_sum_reference(centred * centred) / width
    normed = centred * torch.rsqrt(variance + eps)[:, None]
    if w is not None:
        normed = normed * w.to(wide.dtype)
    return (normed if b is None else normed + b.to(wide.dtype)).to(x.dtype)


def add_layer_norm_reference(x, residual, w, b, eps):
    """The formula in plain torch.  x [M, H] or [S, M, H], residual [M, H] -> two [M, H]"""
    total = add_residual(x, residual)
    return layer_norm_reference(total, w, b, eps), total


@jit(do_not_specialize=["num_rows"])
def _add_layer_norm(
    parts, residual, w, b, normed, total, num_rows, eps,
    S: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row. With S = 0 nothing is added, and `parts` and `total` are not used."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    at = row * H + column
    await_previous(OVERLAP)
    release_next(OVERLAP)
    h = tl.load(residual + at, mask=inside, other=0.0)
    if S > 0:
        x = sum_parts(parts, at, num_rows.to(tl.int64) * H, inside, S, h.dtype)
        h = (x.to(tl.float32) + h.to(tl.float32)).to(h.dtype)
        tl.store(total + at, h, mask=inside)
    wide = h.to(tl.float32)
    centred = tl.where(inside, wide - tl.div_rn(tl.sum(wide), H * 1.0), 0.0)
    y = centred * tl.rsqrt(tl.div_rn(tl.sum(centred * centred), H * 1.0) + eps)
    if w is not None:
        y *= tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    if b is not None:
        y += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, y.to(h.dtype), mask=inside)


def _launch(parts, residual, w, b, eps):
    """parts [S, M, H] or None, residual [M, H]  ->  (normed, total), each [M, H]"""
    rows, width = residual.shape
    residual, w, b = (None if x is None else aligned(x) for x in (residual, w, b))
    normed = empty_rows(rows, width, residual.dtype, residual.device)
    total = None if parts is None else torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    if rows:
        _add_layer_norm[(rows,)](
            None if parts is None else aligned(parts), residual, w, b, normed, total, rows, eps,
            0 if parts is None else parts.shape[0], width, block,
            num_warps=num_warps(block), enable_fp_fusion=False, **overlap(residual),
        )  # fmt: skip
    return normed, total


def layer_norm(x, w=None, b=None, eps=1e-5):
    """LayerNorm over the last dimension.  x [M, H], w and b [H] or None -> [M, H]; ValueError for shapes that do not fit"""
    _check("layer_norm", x, w, b)
    if not on_triton(x):
        return layer_norm_reference(x, w, b, eps)
    return _launch(None, x, w, b, eps)[0]


def add_layer_norm(x, residual, w=None, b=None, eps=1e-5):
    """Residual addition and LayerNorm: (layer_norm(s, w, b), s) with s = residual + round(x).

    x [M, H], or parts [S, M, H] to be added in order; residual [M, H], w and b [H] or None -> two [M, H] in the dtype of residual.
    Raises ValueError for shapes that do not fit.
    """
    _check("add_layer_norm", residual, w, b)
    if x.shape[-2:] != residual.shape or x.dim() not in (2, 3):
        raise ValueError(
            "add_layer_norm takes x [M, H] or [S, M, H] and residual [M, H], got "
            f"{tuple(x.shape)} and {tuple(residual.shape)}"
        )
    if not on_triton(residual):
        return add_layer_norm_reference(x, residual, w, b, eps)
    return _launch(x if x.dim() == 3 else x[None], residual, w, b, eps)


def _check(op, x, w, b):
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"{op} takes rows [M, N] with N > 0, got {list(x.shape)}")
    for name, parameter in (("w", w), ("b", b)):
        if parameter is not None and parameter.shape != x.shape[1:]:
            raise ValueError(f"{op} takes {name} [{x.shape[1]}] for rows {list(x.shape)}, got {list(parameter.shape)}")
