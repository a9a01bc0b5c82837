"""RMSNorm with its gradients, one pass over memory forward and one backward.

    y  = round(n) * w           n = scale x,  scale = 1 / sqrt(mean(x^2) + eps)               rounded to the dtype of x, twice
    dx = scale (g - n mean(g n)),  g = w dy                     dw = sum over rows of round(n) dy

x and y have one dtype, w may be wider: a head's fp32 weights under autocast. All arithmetic is fp32 on a GPU. Plain torch takes
about eight passes forward and as many backward, most of them over fp32 copies. Sums over rows have a fixed order.

Letters: M rows, H width.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from ..rms_norm import rms_norm_reference

PROGRAMS = 512  # that share the rows in the backward pass: each leaves one sum of dw
TILE = 4096  # values that a program holds at once, where rows are shorter


def trained_rms_norm_reference(x, w, eps):
    """The formula in plain torch, whose gradients autograd finds.  [..., H], [H] -> [..., H]"""
    return rms_norm_reference(x, w, eps).to(x.dtype)


@jit(do_not_specialize=["num_rows"])
def _rms_norm_forward(x, w, y, num_rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None]
    inside = (row < num_rows) & (column < width)
    weight = tl.load(w + column, mask=column < width, other=0.0).to(tl.float32)
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    normed = (value * scale).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + column, (normed * weight).to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_rows"])
def _rms_norm_backward(
    x, w, dy, dx, dw, num_rows, width, stride, eps, DX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Every PROGRAMS-th tile of rows. dy: rows `stride` apart; dw [PROGRAMS, H]"""
    column = tl.arange(0, BLOCK)[None]
    weight = tl.load(w + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < num_rows) & (column < width)
        value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        normed = value * scale
        total += grad * normed.to(x.dtype.element_ty).to(tl.float32)
        if DX:
            grad = grad * weight
            mean = (tl.sum(grad * value, 1) / width)[:, None] * scale
            tl.store(dx + row * width + column, (scale * (grad - normed * mean)).to(dx.dtype.element_ty), mask=inside)
    at = tl.program_id(0) * width + tl.arange(0, BLOCK)
    tl.store(dw + at, tl.sum(total, 0), mask=tl.arange(0, BLOCK) < width)


class _TrainedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        """x [M, H] contiguous, w [H] -> [M, H]"""
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        y, tile = torch.empty_like(x), _tile(x.shape[1])
        if len(x):
            _rms_norm_forward[(triton.cdiv(len(x), tile["ROWS"]),)](x, w, y, *x.shape, eps, **tile)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors  # asked for once: checkpointing computes them again
        tile = _tile(x.shape[1])
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        wants_dx = ctx.needs_input_grad[0]
        dx = torch.empty_like(x) if wants_dx else None
        programs = max(min(PROGRAMS, triton.cdiv(len(x), tile["ROWS"])), 1)
        parts = torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
        _rms_norm_backward[(programs,)](x, w, dy, dx, parts, *x.shape, dy.stride(0), ctx.eps, wants_dx, **tile)
        return dx, parts.sum(0).to(w.dtype), None


def _tile(width):
    block = triton.next_power_of_2(width)
    rows = max(TILE // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // 512, 1), 16)}


def trained_rms_norm(x, w, eps):
    """x / sqrt(mean(x^2) + eps) * w in the dtype of x, with gradients for both.  [..., H], [H] -> [..., H]

    ValueError for shapes that do not fit.
    """
    if x.shape[-1:] != w.shape:
        raise ValueError(f"trained_rms_norm takes x [..., H] and w [H], got {tuple(x.shape)} and {tuple(w.shape)}")
    if not on_triton(x) or x.dtype == torch.float64:
        return trained_rms_norm_reference(x, w, eps)
    return _TrainedRMSNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), w, eps).view(x.shape)
