"""The residual block of Medusa heads after its product: y = x + silu(z), for all heads at once.

    x [M, H], parts [S, M, K * H] (z of head k in columns k H to (k + 1) H, in S parts to be added)  ->  y [K, M, H]

z is the sum of the parts in order, rounded to the dtype of x; silu(z) = z / (1 + exp(-z)) is computed in fp32 at least and
rounded, then added. Head k's rows lie together, as the next products want them. Not supported: biases (they are in the parts).
"""

import torch

from ..jit import jit, on_triton, tl, triton
from .linear import empty_rows, sum_parts

_BLOCK = 1024  # features per program


def add_silu_reference(x, parts, num_heads):
    """The formula in plain torch, any dtype.  [M, H], [S, M, K H] -> [K, M, H]"""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    z = total.to(x.dtype).to(torch.promote_types(x.dtype, torch.float32))
    # Written out: the library's silu gives the elements that do not fill a vector register other last bits.
    silu = (z / (1 + torch.exp(-z))).to(x.dtype)
    return x + silu.view(x.shape[0], num_heads, x.shape[1]).transpose(0, 1)


@jit(do_not_specialize=["num_rows"])
def _add_silu(x, parts, out, num_rows, width, num_heads, S: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x + row * width + column, mask=inside)
    at = (row * num_heads + head) * width + column
    stride = num_rows.to(tl.int64) * num_heads * width
    z = sum_parts(parts, at, stride, inside, S, x.dtype).to(tl.float32)
    silu = tl.div_rn(z, 1.0 + tl.exp(-z)).to(x.dtype)
    y = (x.to(tl.float32) + silu.to(tl.float32)).to(x.dtype)
    tl.store(out + (head * num_rows.to(tl.int64) + row) * width + column, y, mask=inside)


def add_silu(x, parts, num_heads):
    """x + silu(sum of parts) for each of `num_heads` heads.  x [M, H] or [M, 1, H], parts [S, M, K H] -> [K, M, H]

    Raises ValueError for shapes that do not fit.
    """
    if x.dim() == 3 and x.shape[1] == 1:
        x = x[:, 0]
    if x.dim() != 2 or parts.dim() != 3 or parts.shape[1:] != (x.shape[0], num_heads * x.shape[1]):
        raise ValueError(
            f"add_silu takes x [M, H] and parts [S, M, {num_heads} H], got {tuple(x.shape)} and {tuple(parts.shape)}"
        )
    if not on_triton(x):
        return add_silu_reference(x, parts, num_heads)
    rows, width = x.shape
    out = empty_rows(num_heads * rows, width, x.dtype, x.device).view(num_heads, rows, width)
    if out.numel():
        grid = (rows, num_heads, triton.cdiv(width, _BLOCK))
        _add_silu[grid](
            x.contiguous(), parts.contiguous(), out, rows, width, num_heads, parts.shape[0], _BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
