"""The experts of transformers' modules on our products (kernels/linear/experts.py), in the place that the library leaves for them.

A module of experts holds `gate_up_proj` [E, 2 I, H] (`up_proj` [E, I, H] where it has no gate) and `down_proj` [E, H, I], their
biases, and an activation. Where `is_transposed` says so, the weights are [.., K, N]. It calls a registered function with rows
[M, H] and the router's choice [M, k].
"""

from functools import partial

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from ....kernels.linear.experts import SILU, experts
from .deferred import computed
from .row_ops import RowOps, UnsupportedOperation

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
UNKNOWN = {"has_post_expert_norm": "a norm after each expert", "_is_expert_parallel": "experts divided over devices"}


def register_experts(name):
    """Make `run_experts` known to transformers by this name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, run_experts)


def expert_weights(part):
    """The weights [E, N, K] or [E, K, N] of a module, [] if it is none of experts."""
    found = [getattr(part, name, None) for name in WEIGHTS if is_weight_of_experts(part, name)]
    return [weight for weight in found if isinstance(weight, nn.Parameter)]


def is_weight_of_experts(part, name):
    """Whether a module's parameter of this name is a weight of experts."""
    return hasattr(part, "is_transposed") and name in WEIGHTS


def is_gated(part, name):
    """Whether this weight of experts has gate rows, then up rows, as silu(gate) * up takes them."""
    return name == "gate_up_proj" and _activation(part) == SILU


def run_experts(module, hidden_states, top_k_index, top_k_weights):
    """The registered function.  [M, H], [M, k] each -> [M, H]"""
    for name, what in UNKNOWN.items():
        if getattr(module, name, False):
            raise UnsupportedOperation(f"it has {what}")
    up, up_bias = (_weight(module, name) for name in (_up_name(module), f"{_up_name(module)}_bias"))
    down, down_bias = _weight(module, "down_proj"), _weight(module, "down_proj_bias")
    mode, act = _get_current_dispatch_mode(), _activation(module)
    if hidden_states.is_meta:  # only looked at
        mode.mixtures.add((top_k_index.shape[1], len(up)))
        return torch.empty_like(hidden_states)
    up_part, down_part = (mode.groups.get(id(getattr(module, name))) for name in (_up_name(module), "down_proj"))
    joined, splits = None, None
    if up_part:  # ranks divide the features (divided_products.py)
        up_bias, joined = up_part.bias(up_bias), partial(up_part.joined, stretches=1)
    if down_part:
        down_bias, splits = down_part.bias(down_bias), down_part.splits
    with _disable_current_modes():
        hidden_states, top_k_index, top_k_weights = computed((hidden_states, top_k_index, top_k_weights))
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        found = experts(rows, top_k_index, top_k_weights, up, down, act, up_bias, down_bias, joined, splits)
        return (down_part.joined(found) if down_part else found).view_as(hidden_states)


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
