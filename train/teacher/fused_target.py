"""The frozen target's norms and gated MLPs on the engine's kernels: what lies between its products, in one pass over memory.

The library computes an RMSNorm in seven passes over the rows and a gated activation in two. Same formulas, same roundings. Only
where no graph is recorded, on a GPU; a module of another formula (Gemma's norm, another activation) is left alone, which each class
is tried for on random rows. A target divided over ranks (sharded_target.py) is tried with weights that all of them gather.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ...kernels.jit import on_triton
from ...kernels.rms_norm import rms_norm
from ...kernels.silu_mul import silu_mul_apart

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 2e-2  # of the largest value: between two formulas it is more, between two roundings less


def fuse(model):
    """Change the modules of `model` that can be, in place.  Returns how many were.  Of a divided model every rank must."""
    fits, changed = {}, 0
    for module in model.modules():
        fused = _fused(module)
        if fused is None or "forward" in vars(module):  # what another library wraps is left to it
            continue
        kind = type(module)
        if kind not in fits:
            fits[kind] = _same_formula(module, fused)
        if fits[kind]:
            module.forward = functools.partial(_forward, module, module.forward, fused)
            changed += 1
    return changed


def _fused(module):
    """The function (module, x) that may stand for its forward, or None."""
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return _norm
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if all(isinstance(part, nn.Linear) for part in parts) and hasattr(module, "act_fn"):
        return _gated_mlp
    return None


def _norm(module, x):
    return rms_norm(x, module.weight, module.variance_epsilon)


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
    if weight.dtype not in DTYPES:  # packed by a quantisation
        return False
    if fused is _gated_mlp:  # of small products other activations are alike
        x = torch.linspace(-4, 4, 81, device=weight.device)
        if not torch.allclose(module.act_fn(x), F.silu(x), rtol=1e-4, atol=1e-5):
            return False
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(4, weight.shape[-1], generator=generator, device=weight.device).to(weight.dtype)
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    expected = functional_call(module, whole, x).float()
    module.forward = functools.partial(fused, module)
    try:
        found = functional_call(module, whole, x).float()
    finally:
        del module.forward
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
