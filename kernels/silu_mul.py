"""SiLU-and-multiply of a gated MLP: y = gate / (1 + exp(-gate)) * up, both halves of one packed product.

    gate_up [M, 2 I]  ->  [M, I]

Computed in fp32 at least. The formula is written out because the library's silu takes another exponential for the elements
that do not fill a vector register: its last bit depends on where a row stands. torch.exp does not. On a GPU the same formula
is a kernel; its device function also ends the fused product of gated_mlp.py.
"""

import torch

from .jit import jit, on_triton, tl, triton
from .overlap import await_previous, overlap, release_next


def silu_mul_reference(gate_up):
    """The formula in torch, any dtype.  [M, 2 I] -> [M, I]"""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


@jit
def silu_product(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up as DTYPE; gate and up are rounded to DTYPE first, as if they had been stored."""
    gate = gate.to(DTYPE).to(tl.float32)
    return (gate / (1 + tl.exp(-gate)) * up.to(DTYPE).to(tl.float32)).to(DTYPE)


@jit
def _silu_mul(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_previous(OVERLAP)
    release_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    gate = tl.load(gate_up + row * 2 * I + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + row * 2 * I + I + columns, mask=mask, other=0.0)
    tl.store(out + row * I + columns, silu_product(gate, up, out.dtype.element_ty), mask=mask)


def silu_mul(gate_up):
    """silu(gate_up[:, :I]) * gate_up[:, I:].  [M, 2 I] -> [M, I]; ValueError if the width is odd"""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul takes gate and up side by side, got an odd width of {gate_up.shape[-1]}")
    if not on_triton(gate_up):
        return silu_mul_reference(gate_up)
    width = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_mul[(out.numel() // width, triton.cdiv(width, 1024))](gate_up, out, width, 1024, **overlap(out))
    return out
