"""Rows of the embedding table.

    embed(tokens, table, multiplier) = round(table[tokens] * multiplier)       tokens [M], table [V, H] -> [M, H]

Not supported: padding indices, tokens outside of the table (on a GPU they read whatever lies there).
"""

import torch

from .jit import jit, on_triton, tl, triton

_BLOCK = 1024  # features per program


def embed_reference(tokens, table, multiplier=1.0):
    """The formula; the product in fp32 at least.  [M], [V, H] -> [M, H]"""
    rows = table[tokens.long()]
    if multiplier == 1:
        return rows
    return (rows.to(torch.promote_types(table.dtype, torch.float32)) * multiplier).to(table.dtype)


@jit(do_not_specialize_on_alignment=["tokens"])
def _embed(tokens, table, out, width, multiplier, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(table + tl.load(tokens + row).to(tl.int64) * width + column, mask=inside)
    if SCALED:
        x = (x.to(tl.float32) * multiplier).to(x.dtype)
    tl.store(out + row * width + column, x, mask=inside)


def embed(tokens, table, multiplier=1.0):
    """table[tokens], times a constant if the model has one.  tokens [M] integers, table [V, H] -> [M, H]

    Raises ValueError for shapes that do not fit.
    """
    if tokens.dim() != 1 or table.dim() != 2:
        raise ValueError(f"embed takes tokens [M] and table [V, H], got {tuple(tokens.shape)} and {tuple(table.shape)}")
    if not on_triton(table):
        return embed_reference(tokens, table, multiplier)
    width = table.shape[1]
    out = torch.empty(tokens.shape[0], width, dtype=table.dtype, device=table.device)
    if out.numel():
        grid = (tokens.shape[0], triton.cdiv(width, _BLOCK))
        _embed[grid](
            tokens.contiguous(), table.contiguous(), out, width, multiplier, multiplier != 1, _BLOCK, num_warps=4
        )
    return out
