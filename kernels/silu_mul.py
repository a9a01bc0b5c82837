"""SiLU-and-multiply of a gated MLP: y = gate / (1 + exp(-gate)) * up, both halves of one packed product.

    gate_up [M, 2 I]  ->  [M, I];     apart: gate [..., I], up [..., I]  ->  [..., I]

Computed in fp32 at least. The formula is written out because the library's silu takes another exponential for the elements
that do not fill a vector register: its last bit depends on where a row stands. torch.exp does not. On a GPU the same formula
is a kernel; its device function also ends the fused product of gated_mlp.py.
"""

import torch

from .jit import jit, on_triton, tl, triton
from .overlap import await_previous, overlap, release_next


def silu_mul_reference(gate_up):
    """The formula in torch, any dtype.  [M, 2 I] -> [M, I]"""
    return _reference(*gate_up.chunk(2, -1))


def _reference(gate, up):
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate, up, dtype = gate.to(wide), up.to(wide), gate.dtype
    return (gate / (1 + torch.exp(-gate)) * up).to(dtype)


@jit
def silu_product(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up as DTYPE; gate and up are rounded to DTYPE first, as if they had been stored."""
    gate = gate.to(DTYPE).to(tl.float32)
    return (gate / (1 + tl.exp(-gate)) * up.to(DTYPE).to(tl.float32)).to(DTYPE)


@jit
def _silu_mul(gate, up, out, STRIDE: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_previous(OVERLAP)
    release_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    left = tl.load(gate + row * STRIDE + columns, mask=mask, other=0.0)
    right = tl.load(up + row * STRIDE + columns, mask=mask, other=0.0)
    tl.store(out + row * I + columns, silu_product(left, right, out.dtype.element_ty), mask=mask)


def silu_mul(gate_up):
    """silu(gate_up[:, :I]) * gate_up[:, I:].  [M, 2 I] -> [M, I]; ValueError if the width is odd"""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul takes gate and up side by side, got an odd width of {gate_up.shape[-1]}")
    if not on_triton(gate_up):
        return silu_mul_reference(gate_up)
    gate_up = gate_up.contiguous()
    return _launch(*gate_up.chunk(2, -1), gate_up.shape[-1])


def silu_mul_apart(gate, up):
    """silu(gate) * up of two products.  [..., I], [..., I] -> [..., I]; ValueError if they differ in shape or dtype"""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        given = f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        raise ValueError(f"silu_mul_apart takes gate and up of one shape and dtype, got {given}")
    if not on_triton(gate):
        return _reference(gate, up)
    return _launch(gate.contiguous(), up.contiguous(), gate.shape[-1])


def _launch(gate, up, stride):
    """gate, up [..., I], whose rows start `stride` elements apart  ->  [..., I]"""
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        grid = (out.numel() // width, triton.cdiv(width, 1024))
        _silu_mul[grid](gate, up, out, stride, width, 1024, **overlap(out))
    return out
