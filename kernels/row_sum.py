"""Sums over the last dimension, each row in one order: what means, softmax and layer norms are made of.

    row_sum(x)      [M, N] -> [M] in fp32 (fp64 stays)
    row_softmax(x)  [M, N] -> [M, N] in fp32 (fp64 stays)
    layer_norm(x, w, b, eps)
                    (x - mean) / sqrt(variance + eps) * w + b in fp32, rounded once    x [M, H], w and b [H] or None -> [M, H]

A library's sum may take another order for another number of rows. Here a row is halved and its halves are added until one number
is left, on the CPU; on a GPU one program adds a row, with a block and warps that depend on N alone.

Letters: M rows, N or H columns.
"""

import torch

from .jit import jit, on_triton, tl, triton


def row_sum_reference(x):
    """The sum as a tree of halves.  [M, N] -> [M]"""
    x = x if x.dtype == torch.float64 else x.float()
    size = 1 << (x.shape[-1] - 1).bit_length()
    if size > x.shape[-1]:
        x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x.squeeze(-1)


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


@jit(do_not_specialize=["width"])
def _row_sum(x, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    found = tl.load(x + row * width + column, mask=column < width, other=0.0)
    tl.store(out + row, tl.sum(found.to(out.dtype.element_ty), 0))


@jit(do_not_specialize=["width"])
def _layer_norm(x, w, b, y, width, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    found = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, found - tl.sum(found, 0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    if w is not None:
        normed *= tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    if b is not None:
        normed += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, normed.to(y.dtype.element_ty), mask=inside)


def _launch(width):
    """Block and warps of a row: they order its sum."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 16)


def row_sum(x):
    """The sum of every row, in fp32 at least.  [M, N] -> [M]; ValueError for another rank or no columns"""
    _check("row_sum", x)
    if not on_triton(x):
        return row_sum_reference(x)
    out = torch.empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if len(x):
        block, warps = _launch(x.shape[1])
        _row_sum[(len(x),)](x.contiguous(), out, x.shape[1], block, num_warps=warps, enable_fp_fusion=False)
    return out


def row_softmax(x):
    """The softmax of every row, in fp32 at least.  [M, N] -> [M, N]; ValueError for another rank or no columns"""
    _check("row_softmax", x)
    wide = x if x.dtype == torch.float64 else x.float()
    terms = torch.exp(wide - wide.amax(-1, keepdim=True))
    return terms / row_sum(terms)[:, None]


def layer_norm(x, w=None, b=None, eps=1e-5):
    """LayerNorm over the last dimension.  x [M, H], w and b [H] or None -> [M, H]; ValueError for shapes that do not fit"""
    _check("layer_norm", x)
    for name, parameter in (("w", w), ("b", b)):
        if parameter is not None and parameter.shape != x.shape[1:]:
            raise ValueError(
                f"layer_norm takes {name} [{x.shape[1]}] for x {list(x.shape)}, got {list(parameter.shape)}"
            )
    if not on_triton(x):
        return layer_norm_reference(x, w, b, eps)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if len(x):
        block, warps = _launch(x.shape[1])
        _layer_norm[(len(x),)](x.contiguous(), w, b, y, x.shape[1], eps, block, num_warps=warps, enable_fp_fusion=False)
    return y


def _check(op, x):
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"{op} takes rows [M, N] with N > 0, got {list(x.shape)}")
