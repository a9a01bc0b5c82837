"""Rotary position embedding in the half-split layout of Llama (arXiv 2104.09864).

    x [M, h, D], cos and sin [M, D/2] at each row's position:
    y[..., :D/2] = x1 cos - x2 sin,   y[..., D/2:] = x2 cos + x1 sin        with x1, x2 the halves of x

Computed in fp32, returned in the dtype of x. Not supported: interleaved pairs (GPT-J), partial rotation.
"""

import torch


def rotary(x, cos, sin):
    """Rotate every head of x.  x [M, h, D], cos and sin [M, D/2] -> [M, h, D]"""
    if x.dim() != 3 or cos.shape != (x.shape[0], x.shape[2] // 2) or cos.shape != sin.shape:
        raise ValueError(
            f"rotary takes x [M, h, D] with cos, sin [M, D/2], got {tuple(x.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    x1, x2 = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)
