"""The MLP speculator's state after one more token (heads/mlp_speculator.py), from the product on.

    parts [S, M, I]     the projected state in S parts to be added in order
    tokens [M]; table [V, I]; w, b [I]
    ->  [M, I]          GELU(norm(x + multiplier * table[tokens])), norm(x) = x / sqrt(mean(x^2) + eps) * w + b

The parts are added and rounded; every step is rounded to the table's dtype, means and GELU (the exact one) are computed in fp32
at least. One program per row with a block that depends on I alone. Not supported: tokens outside of the table.
"""

import torch
import torch.nn.functional as F

from ..jit import jit, on_triton, tl, triton
from ..linear.linear import empty_rows, sum_parts


def speculator_state_reference(parts, tokens, table, multiplier, w, b, eps):
    """The formula in plain torch, any dtype.  -> [M, I]"""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    x = total.to(table.dtype) + table[tokens.long()] * multiplier
    wide = x if x.dtype == torch.float64 else x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return F.gelu(normed * w + b)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["tokens"])
def _speculator_state(
    parts, tokens, table, w, b, out, num_rows, width, multiplier, eps, S: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype: tl.constexpr = table.dtype.element_ty
    embedded = tl.load(table + tl.load(tokens + row).to(tl.int64) * width + column, mask=inside, other=0.0)
    x = sum_parts(parts, row * width + column, num_rows.to(tl.int64) * width, inside, S, dtype)
    embedded = (embedded.to(tl.float32) * multiplier).to(dtype)
    wide = (x.to(tl.float32) + embedded.to(tl.float32)).to(dtype).to(tl.float32)
    mean = tl.div_rn(tl.sum(wide * wide), width.to(tl.float32))
    y = (wide * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
    y = (y * tl.load(w + column, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    y = (y + tl.load(b + column, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    y = y * 0.5 * (1.0 + tl.erf(y * 0.7071067811865476))
    tl.store(out + row * width + column, y.to(dtype), mask=inside)


def speculator_state(parts, tokens, table, multiplier, w, b, eps=1e-6):
    """The state after `tokens`; shapes as in the legend above. Raises ValueError for shapes that do not fit."""
    width = table.shape[1]
    if parts.dim() != 3 or parts.shape[1:] != (tokens.shape[0], width) or w.shape != (width,) or b.shape != (width,):
        raise ValueError(
            f"speculator_state takes parts [S, M, {width}] for {tokens.shape[0]} tokens, w and b [{width}], got "
            f"{tuple(parts.shape)}, {tuple(w.shape)} and {tuple(b.shape)}"
        )
    if not on_triton(table):
        return speculator_state_reference(parts, tokens, table, multiplier, w, b, eps)
    rows, block = tokens.shape[0], triton.next_power_of_2(width)
    out = empty_rows(rows, width, table.dtype, table.device)
    if rows:
        _speculator_state[(rows,)](
            parts.contiguous(), tokens.contiguous(), table, w, b, out, rows, width, multiplier, eps, parts.shape[0], block,
            num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False,
        )  # fmt: skip
    return out
