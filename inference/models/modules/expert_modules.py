"""The experts of transformers' modules on our products (kernels/linear/experts.py), in the place that the library leaves for them.

A module of experts holds `gate_up_proj` [E, 2 I, H] (`up_proj` [E, I, H] where it has no gate) and `down_proj` [E, H, I], their
biases, and an activation. Where `is_transposed` says so, the weights are [.., K, N]. It calls a registered function with rows
[M, H] and the router's choice [M, k].
"""

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from ....kernels.linear.experts import SILU, experts
from .deferred import computed
from .row_ops import RowOps, UnsupportedOperation

UNKNOWN = {"has_post_expert_norm": "a norm after each expert", "_is_expert_parallel": "experts divided over devices"}


def register_experts(name):
    """Make `run_experts` known to transformers by this name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, run_experts)


def expert_weights(part):
    """The weights [E, N, K] or [E, K, N] of a module, [] if it is none of experts."""
    if not hasattr(part, "is_transposed"):
        return []
    names = ("gate_up_proj", "up_proj", "down_proj")
    return [weight for name in names if isinstance(weight := getattr(part, name, None), nn.Parameter)]


def run_experts(module, hidden_states, top_k_index, top_k_weights):
    """The registered function.  [M, H], [M, k] each -> [M, H]"""
    for name, what in UNKNOWN.items():
        if getattr(module, name, False):
            raise UnsupportedOperation(f"it has {what}")
    up, up_bias = (_weight(module, name) for name in (_up_name(module), f"{_up_name(module)}_bias"))
    down, down_bias = _weight(module, "down_proj"), _weight(module, "down_proj_bias")
    if hidden_states.is_meta:  # only looked at
        _get_current_dispatch_mode().mixtures.add((top_k_index.shape[1], len(up)))
        return torch.empty_like(hidden_states)
    act = _activation(module)
    with _disable_current_modes():
        hidden_states, top_k_index, top_k_weights = computed((hidden_states, top_k_index, top_k_weights))
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return experts(rows, top_k_index, top_k_weights, up, down, act, up_bias, down_bias).view_as(hidden_states)


def _up_name(module):
    return "gate_up_proj" if module.has_gate else "up_proj"


def _weight(module, name):
    """[E, N, K], a bias [E, N], or None"""
    if name.endswith("_bias"):
        return getattr(module, name) if module.has_bias else None
    weight = getattr(module, name)
    return weight.mT if module.is_transposed else weight


def _activation(module):
    """SILU, or what the module does between its two products, which works element by element."""
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate

    if not module.has_gate:
        own = module.act_fn
    elif type(module)._apply_gate is _default_apply_gate and isinstance(module.act_fn, (nn.SiLU, type(ACT2FN[SILU]))):
        return SILU
    else:
        own = module._apply_gate

    def act(hidden):
        with RowOps():
            found = own(hidden)
        return computed(found)

    return act
