"""DFlash2's convolution: every slot of a block is mixed, channel by channel, with the slots before it.

    y_t = sum over j < J of (base_j + correction_{t,j}) x_{t-j}         x before the block's first slot is 0

    x [M, H], or parts [S, M, H] of a product, added in order; base [J, H]; corrections [M, J, G], shared by the H / G channels of a
    group  ->  y [M, H]. Rows are whole blocks, one after the other.

Computed in fp32 at least on a GPU; the reference in the operands' dtype, as heads train with it. One program per row and chunk of
channels. Not here: where the corrections come from (heads/block_parts.py), a backward on a GPU.

Letters: M rows, H hidden, S parts, J taps, G groups, R blocks, N slots of a block.
"""

import torch
import torch.nn.functional as F

from .jit import jit, on_triton, tl, triton
from .linear.linear import sum_parts
from .overlap import await_previous, overlap, release_next

_BLOCK = 1024  # channels per program


def block_convolution_reference(x, base, corrections, block_size):
    """The formula in torch, with any leading axes.  x [..., M, H], base [J, H], corrections [..., M, J, G] -> [..., M, H]"""
    shape, size = x.shape, x.shape[-1] // corrections.shape[-1]
    x = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, block_size))  # [..., R, N, G, H / G]
    base, corrections = base.unflatten(-1, (-1, size)), corrections.unflatten(-3, (-1, block_size))
    found = 0
    for j in range(len(base)):
        earlier = F.pad(x[..., : block_size - j, :, :], (0, 0, 0, 0, j, 0))
        found = found + base[j] * earlier + corrections[..., j, :, None] * earlier
    return found.view(shape).to(x.dtype)  # weights that are wider, as under autocast, widen nothing


@jit(do_not_specialize=["num_rows"])
def _block_convolution(
    parts, base, corrections, out, num_rows, stride, width, block_size,
    S: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = column < width, row % block_size
    await_previous(OVERLAP)
    release_next(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TAPS):
        within = inside & (slot >= j)
        x = sum_parts(parts, (row - j) * width + column, num_rows.to(tl.int64) * width, within, S, out.dtype.element_ty)
        factor = tl.load(base + j * width + column, mask=inside, other=0.0).to(tl.float32)
        place = row * stride + j * (width // GROUP) + column // GROUP
        factor += tl.load(corrections + place, mask=inside, other=0.0).to(tl.float32)
        total += factor * x.to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def block_convolution(x, base, corrections, block_size):
    """See above.  x [M, H] or parts [S, M, H], base [J, H], corrections [M, J, G] -> [M, H] in the dtype of the corrections

    The corrections' last two axes are contiguous: a part of a product's columns is. ValueError for shapes that do not fit.
    """
    rows, width = x.shape[-2:]
    fits = x.dim() in (2, 3) and base.dim() == 2 and corrections.dim() == 3 and base.shape[1] == width
    if not fits or corrections.shape[:2] != (rows, len(base)) or width % corrections.shape[2] or rows % block_size:
        given = [tuple(one.shape) for one in (x, base, corrections)]
        raise ValueError(
            "block_convolution takes x [M, H] or [S, M, H], base [J, H], corrections [M, J, G], whole blocks and groups, got "
            f"{', '.join(map(str, given))} and blocks of {block_size}"
        )
    parts = x if x.dim() == 3 else x[None]
    if not on_triton(x):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return block_convolution_reference(total.to(corrections.dtype), base, corrections, block_size)
    out = torch.empty(rows, width, dtype=corrections.dtype, device=x.device)
    if rows:
        groups = corrections.shape[2]
        if corrections.stride()[1:] != (groups, 1):
            corrections = corrections.contiguous()
        _block_convolution[(rows, triton.cdiv(width, _BLOCK))](
            parts.contiguous(), base.contiguous(), corrections, out, rows, corrections.stride(0), width, block_size,
            len(parts), len(base), width // groups, _BLOCK, num_warps=4, **overlap(out),
        )  # fmt: skip
    return out
