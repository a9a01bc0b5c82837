"""SiLU-and-multiply of a gated MLP with its gradients, one pass over memory forward and one backward.

    y = s gate up,  s = 1 / (1 + exp(-gate))           d up = dy s gate,   d gate = dy up s (1 + gate (1 - s))

All arithmetic is fp32 on a GPU. Plain torch takes two passes and three, and keeps SiLU's result beside gate and up.
"""

import torch
import torch.nn.functional as F

from ..jit import jit, on_triton, tl, triton
from ..silu_mul import silu_mul_apart

BLOCK = 1024


def trained_silu_mul_reference(gate, up):
    """The formula in plain torch, whose gradients autograd finds."""
    return F.silu(gate) * up


@jit(do_not_specialize=["count"])
def _silu_mul_backward(gate, up, dy, d_gate, d_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate_ = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    up_ = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate_))
    tl.store(d_up + at, (grad * s * gate_).to(d_up.dtype.element_ty), mask=inside)
    tl.store(d_gate + at, (grad * up_ * s * (1 + gate_ * (1 - s))).to(d_gate.dtype.element_ty), mask=inside)


class _TrainedSiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return silu_mul_apart(gate, up)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        d_gate, d_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        if count:
            _silu_mul_backward[(triton.cdiv(count, BLOCK),)](gate, up, dy.contiguous(), d_gate, d_up, count, BLOCK)
        return d_gate, d_up


def trained_silu_mul(gate, up):
    """silu(gate) * up with gradients for both.  two [..., I] -> [..., I]; ValueError if they differ in shape or dtype"""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        given = f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        raise ValueError(f"trained_silu_mul takes gate and up of one shape and dtype, got {given}")
    if not on_triton(gate) or gate.dtype == torch.float64:
        return trained_silu_mul_reference(gate, up)
    return _TrainedSiluMul.apply(gate.contiguous(), up.contiguous())
