"""RMSNorm, alone and behind a residual addition.

    rms_norm(x, w)          = x / sqrt(mean(x^2) + eps) * w                x [M, H], w [H] -> [M, H]
    add_rms_norm(x, r, w)   : s = x + r; returns (rms_norm(s, w), s)

Sums run in fp32 over one row at a time. Not supported: LayerNorm's mean subtraction, biases.
"""

import torch


def rms_norm_reference(x, w, eps):
    """The formula in the dtype of x, fp32 at least.  [M, H], [H] -> [M, H]"""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * w


def rms_norm(x, w, eps):
    """x / sqrt(mean(x^2) + eps) * w over the last axis.  [..., H], [H] -> [..., H]"""
    if x.shape[-1:] != w.shape:
        raise ValueError(f"rms_norm takes x [..., H] and w [H], got {tuple(x.shape)} and {tuple(w.shape)}")
    return rms_norm_reference(x, w, eps)


def add_rms_norm(x, residual, w, eps):
    """(rms_norm(x + residual), x + residual).  [M, H], [M, H], [H] -> two [M, H]"""
    residual = x + residual
    return rms_norm(residual, w, eps), residual
