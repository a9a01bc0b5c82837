"""Rotate queries and keys of the frozen target in one pass over memory, instead of the library's five.

The library rotates queries and keys by whole-row operations, each with a rounding: two products, a change of sign, a join, a sum.
The kernel computes in fp32 and rounds once. An attention module is rewritten only if, on random rows, it hands the attention
function the queries, keys and values that this file would, and then only projects what comes back. Modules that do more
(interleaved pairs, partial rotation, sinks, another norm) are left alone, and each module is compared by itself: some layers may
not rotate.

Letters: B rows, T tokens per row, h heads, D their width, H hidden size.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ...kernels.attention.rotary import rotary

COMPARED = "headstart_compared"  # the attention function while modules are compared
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
TOLERANCE = 1e-4  # in fp32, relative to the largest value


def attend(module, hidden_states, position_embeddings, attention_mask, function, further):
    """What the module computes.  hidden_states [B, T, H] -> (the same shape, None)

    position_embeddings: cos and sin, [B or 1, T, D] each, whose halves are the same; function: one of transformers' attention
    functions; further: keywords for it
    """
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k, v = (getattr(module, name)(hidden_states).view(shape) for name in PROJECTIONS[:3])
    norms = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    q, k = (one if norm is None else norm(one) for one, norm in zip((q, k), norms))
    half = module.head_dim // 2
    cos, sin = (one.expand(shape[0], -1, -1).flatten(0, 1)[:, :half] for one in position_embeddings)
    q, k = (rotary(one.flatten(0, 1), cos, sin).view(one.shape) for one in (q, k))
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))  # [B, h, T, D]
    found, _ = function(module, q, k, v, attention_mask, dropout=0.0, scaling=module.scaling, **further)
    return module.o_proj(found.reshape(*shape[:-2], -1)), None


def attention_keywords(module):
    """Keywords that a module adds for the attention function, such as a window; None if it is not what `attend` computes."""
    if not all(isinstance(getattr(module, name, None), nn.Linear) for name in PROJECTIONS):
        return None
    if not hasattr(module, "config") or not hasattr(module, "scaling") or getattr(module, "head_dim", 1) % 2:
        return None
    try:
        return _compare(module)
    except Exception:  # another signature, other shapes, ...: whatever it is, it is not ours
        return None


def whole_parameters(module):
    """{name: parameter} of a module; of a divided one those that all ranks gather."""
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}


@torch.no_grad()
def _compare(module):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def function(module, query, key, value, mask, dropout=0.0, scaling=None, **further):
        seen.append(([query, key, value], mask, dropout, scaling, further))
        return query.transpose(1, 2).contiguous(), None

    def ours(*, hidden_states, position_embeddings, attention_mask):
        return attend(module, hidden_states, position_embeddings, attention_mask, function, {})

    weights = {name: parameter.detach().float() for name, parameter in whole_parameters(module).items()}
    generator, device = torch.Generator().manual_seed(0), weights["q_proj.weight"].device
    width, half = module.q_proj.in_features, module.head_dim // 2
    angle = torch.rand(2, 5, half, generator=generator) * 100
    given = {
        "hidden_states": torch.randn(2, 5, width, generator=generator).to(device),
        "position_embeddings": tuple(torch.cat((one, one), -1).to(device) for one in (angle.cos(), angle.sin())),
        "attention_mask": None,
    }
    before = module.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(COMPARED, function)
    module.config._attn_implementation = COMPARED
    try:
        expected = functional_call(module, weights, (), given)[0]
        module.forward = ours
        found = functional_call(module, weights, (), given)[0]
    finally:
        module.config._attn_implementation = before
        vars(module).pop("forward", None)
        del ALL_ATTENTION_FUNCTIONS._global_mapping[COMPARED]
    (theirs, mask, dropout, scaling, further), (own, _, _, own_scaling, _) = seen
    same = all(_close(one, other) for one, other in zip([*theirs, expected], [*own, found]))
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in further.values())
    return further if same and plain and mask is None and not dropout and scaling == own_scaling else None


def _close(one, other):
    return one.shape == other.shape and bool((one - other).abs().max() <= TOLERANCE * one.abs().max())
