"""Run the frozen target's norms, gated activations and rotations on the engine's kernels, in one pass over memory.

The library computes an RMSNorm in seven passes over the rows and a gated activation in two. fused_attention.py explains rotations.
Norms and activations have the library's formulas and roundings. The kernels are used only on a GPU and without a graph. Each class
of modules is first compared on random rows, and a module of another formula (Gemma's norm, another activation) is left alone. A
target divided over ranks (sharded_target.py) is compared with weights that all ranks gather.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from ...inference.models.modules.norm_modules import norm_eps, plain_norm, same_formula, same_norm
from ...kernels.jit import on_triton
from ...kernels.silu_mul import silu_mul_apart
from .fused_attention import attend, attention_keywords, whole_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse(model):
    """Fuse the modules of `model` that allow it, in place. Returns their number. For a divided model every rank must call it."""
    fits, changed = {}, 0
    for module in model.modules():
        if "forward" in vars(module):  # wrapped by another library: left alone
            continue
        if (further := attention_keywords(module)) is not None:
            module.forward = functools.partial(_attention, module, module.forward, further)
            changed += 1
        fused = _fused(module)
        if fused is None:
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
    return fused(module, x) if _on_kernels(module, x) else plain(x)


def _attention(module, plain, further, *given, **named):
    """The attention of a module whose own keywords for the attention function are `further`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    x, angles, cache = (named.get(name) for name in ("hidden_states", "position_embeddings", "past_key_values"))
    function = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)
    usual = not given and x is not None and angles is not None and cache is None and function is not None
    if not usual or angles[0].shape[-1] != module.head_dim or not _on_kernels(module, x):
        return plain(*given, **named)
    named = {name: value for name, value in named.items() if name not in ("hidden_states", "position_embeddings")}
    mask, _ = named.pop("attention_mask", None), named.pop("past_key_values", None)
    return attend(module, x, angles, mask, function, named | further)


def _on_kernels(module, x):
    dtype = next(module.parameters()).dtype
    library = torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
    return not library and dtype in DTYPES and x.dtype == dtype and on_triton(x)


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
    return same_formula(module, fused, whole_parameters(module))
