"""Run the frozen target's norms and gated activations on the engine's kernels, in one pass over memory.

The library computes an RMSNorm in seven passes over the rows and a gated activation in two. The kernels have the same formulas and
roundings. They are used only on a GPU and without a graph. Each class of modules is first compared on random rows, and a module of
another formula (Gemma's norm, another activation) is left alone. A target divided over ranks (sharded_target.py) is compared with
weights that all ranks gather.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ...inference.models.modules.norm_modules import norm_eps, plain_norm, same_formula, same_norm
from ...kernels.jit import on_triton
from ...kernels.silu_mul import silu_mul_apart

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse(model):
    """Fuse the modules of `model` that allow it, in place. Returns their number. For a divided model every rank must call it."""
    fits, changed = {}, 0
    for module in model.modules():
        fused = _fused(module)
        if fused is None or "forward" in vars(module):  # wrapped by another library: left alone
            continue
        kind = type(module)
        if kind not in fits:
            fits[kind] = _same_formula(module, fused)
        if fits[kind]:
            module.forward = functools.partial(_forward, module, module.forward, fused)
            changed += 1
    return changed


def _fused(module):
    """The function (module, x) that can replace its forward, or None."""
    if norm_eps(module) is not None:
        return plain_norm
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if all(isinstance(part, nn.Linear) for part in parts) and hasattr(module, "act_fn"):
        return _gated_mlp
    return None


def _gated_mlp(module, x):
    return module.down_proj(silu_mul_apart(module.gate_proj(x), module.up_proj(x)))


def _forward(module, plain, fused, x):
    dtype = next(module.parameters()).dtype
    library = torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
    if library or dtype not in DTYPES or x.dtype != dtype or not on_triton(x):
        return plain(x)
    return fused(module, x)


@torch.no_grad()
def _same_formula(module, fused):
    weight = next(module.parameters())
    if weight.dtype not in DTYPES:  # quantised weights
        return False
    if fused is plain_norm:
        return same_norm(module)
    # With small products different activations look alike.
    x = torch.linspace(-4, 4, 81, device=weight.device)
    if not torch.allclose(module.act_fn(x), F.silu(x), rtol=1e-4, atol=1e-5):
        return False
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    return same_formula(module, fused, whole)
