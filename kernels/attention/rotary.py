"""Rotary position embedding in the half-split layout of Llama (arXiv 2104.09864), with its gradient: for heads in training.

    x [M, h, D], cos and sin [M, D/2] at each row's position:
    y[..., :D/2] = x1 cos - x2 sin,   y[..., D/2:] = x2 cos + x1 sin        with x1, x2 the halves of x

Computed in the dtype of cos, fp32 at least, returned in that of x. On a GPU one pass over memory; the gradient is turned back.
Not supported: interleaved pairs (GPT-J), partial rotation, gradients of cos and sin.
"""

import torch

from ..jit import jit, on_triton, tl, triton


def rotary_reference(x, cos, sin):
    """The formula in plain torch, whose gradient autograd finds."""
    x1, x2 = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


@jit
def _rotate(
    x, cos, sin, y, sign, stride, H: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """All heads of one row.  stride: from a row of cos or sin to the next"""
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)[None]
    inside = (head < H) & (lane < HALF)
    at = (row * H + head) * (2 * HALF) + lane
    cos_ = tl.load(cos + row * stride + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    sin_ = tl.load(sin + row * stride + lane, mask=lane < HALF, other=0.0).to(tl.float32) * sign
    x1 = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (x1 * cos_ - x2 * sin_).to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + HALF, (x2 * cos_ + x1 * sin_).to(y.dtype.element_ty), mask=inside)


def _launch(x, cos, sin, sign):
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, heads, dim = x.shape
    if y.numel():
        padded = triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2)
        _rotate[(rows,)](x, cos, sin, y, sign, cos.stride(0), heads, dim // 2, *padded, num_warps=4)
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _launch(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, dy):
        return _launch(dy, *ctx.saved_tensors, -1.0), None, None


def rotary(x, cos, sin):
    """Rotate every head of x, with a gradient for x.  x [M, h, D], cos and sin [M, D/2] -> [M, h, D]"""
    if x.dim() != 3 or cos.shape != (x.shape[0], x.shape[2] // 2) or cos.shape != sin.shape:
        raise ValueError(
            f"rotary takes x [M, h, D] with cos, sin [M, D/2], got {tuple(x.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    if not on_triton(x) or cos.dtype == torch.float64:
        return rotary_reference(x, cos, sin)
    if cos.stride(1) != 1 or cos.stride() != sin.stride():  # the halves of rows that are twice as wide need no copy
        cos, sin = cos.contiguous(), sin.contiguous()
    return _Rotary.apply(x, cos, sin)
