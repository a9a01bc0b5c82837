"""Sums over the last dimension, each row in one order: what means and softmax are made of.

    row_sum(x)      [M, N] -> [M] in fp32 (fp64 stays)
    row_softmax(x)  [M, N] -> [M, N] in fp32 (fp64 stays)

A library's sum may take another order for another number of rows. Here a row is halved and its halves are added until one number
is left, on the CPU; on a GPU one program adds a row, with a block and warps that depend on N alone.

Letters: M rows, N columns.
"""

import torch

from .jit import jit, on_triton, tl, triton
from .overlap import await_previous, overlap, release_next
from .rms_norm import aligned, num_warps


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


def row_softmax_reference(x):
    """The formula in fp32 (fp64).  [M, N] -> [M, N]"""
    wide = x if x.dtype == torch.float64 else x.float()
    terms = torch.exp(wide - wide.amax(-1, keepdim=True))
    return terms / row_sum_reference(terms)[:, None]


@jit(do_not_specialize=["width"])
def _row_sum(x, out, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_previous(OVERLAP)
    release_next(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    found = tl.load(x + row * width + column, mask=column < width, other=0.0)
    tl.store(out + row, tl.sum(found.to(out.dtype.element_ty), 0))


@jit
def _row_softmax(x, out, N: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_previous(OVERLAP)
    release_next(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < N
    found = tl.load(x + row * N + column, mask=inside, other=float("-inf")).to(out.dtype.element_ty)
    terms = tl.where(inside, tl.exp(found - tl.max(found, 0)), 0.0)
    tl.store(out + row * N + column, terms / tl.sum(terms, 0), mask=inside)


def _launch(width):
    """Block and warps of a row: they order its sum."""
    block = triton.next_power_of_2(width)
    return block, num_warps(block)


def row_sum(x):
    """The sum of every row, in fp32 at least.  [M, N] -> [M]; ValueError for another rank or no columns"""
    _check("row_sum", x)
    if not on_triton(x):
        return row_sum_reference(x)
    out = torch.empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if len(x):
        block, warps = _launch(x.shape[1])
        _row_sum[(len(x),)](
            x.contiguous(), out, x.shape[1], block, num_warps=warps, enable_fp_fusion=False, **overlap(x)
        )
    return out


def row_softmax(x):
    """The softmax of every row, in fp32 at least.  [M, N] -> [M, N]; ValueError for another rank or no columns"""
    _check("row_softmax", x)
    if not on_triton(x):
        return row_softmax_reference(x)
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if len(x):
        block, warps = _launch(x.shape[1])
        _row_softmax[(len(x),)](
            aligned(x), out, x.shape[1], block, num_warps=warps, enable_fp_fusion=False, **overlap(x)
        )
    return out


def _check(op, x):
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"{op} takes rows [M, N] with N > 0, got {list(x.shape)}")
