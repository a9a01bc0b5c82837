"""RMSNorm modules of transformers whose formula is that of kernels/rms_norm.py, found by comparing, not by their names alone.

The library computes an RMSNorm in seven operations. Modules whose formula differs by more than rounding are left alone (Gemma
multiplies by 1 + w). Serving and training both replace modules by what is found here.
"""

import inspect

import torch
from torch.func import functional_call

from ....kernels.rms_norm import rms_norm
from .module_lock import lock_of
from .module_outline import has_hooks

TOLERANCE = 2e-2  # relative to the largest value of a row: two formulas differ by more, two roundings by less


def norm_eps(module):
    """eps of an RMSNorm module of rows alone; None if it is something else."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:  # itself and the rows
        return None
    eps = _eps(module)
    return eps if isinstance(eps, float) and module.weight.dim() == 1 else None


def _eps(module):
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def plain_norm(module, x):
    """What such a module computes, if its formula is ours."""
    return rms_norm(x, module.weight, _eps(module))


@torch.no_grad()
def same_formula(module, function, parameters=None):
    """Whether function(module, x) is the module's own forward on random rows, large and small, but for rounding.

    parameters: {name: tensor} to take in the place of its own.
    """
    parameters = dict(module.named_parameters()) | (parameters or {})
    weight = next(iter(parameters.values()))
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(4, weight.shape[-1], generator=generator, device=weight.device)
    # In small rows eps counts.
    x = (x * torch.tensor([[4.0], [1.0], [1e-2], [1e-3]], device=weight.device)).to(weight.dtype)
    expected = functional_call(module, parameters, x).float()
    module.forward = lambda x: function(module, x)
    try:
        found = functional_call(module, parameters, x).float()
    finally:
        del module.forward
    return bool(((found - expected).abs().amax(-1) <= TOLERANCE * expected.abs().amax(-1)).all())


def same_norm(module):
    """Whether an RMSNorm module has the formula of ours, with weights that would tell others from it."""
    generator = torch.Generator(module.weight.device).manual_seed(1)
    weight = torch.rand(module.weight.shape, generator=generator, device=module.weight.device) + 0.5
    return same_formula(module, plain_norm, {"weight": weight.to(module.weight.dtype)})


def norms_of(module):
    """Names of a module's RMSNorms that have our formula. One of each class is compared."""
    same, names = {}, []
    with lock_of(module):
        for name, part in module.named_modules():
            if norm_eps(part) is None or "forward" in vars(part) or has_hooks(part):  # wrapped, or watched: left alone
                continue
            if type(part) not in same:
                same[type(part)] = same_norm(part)
            if same[type(part)]:
                names.append(name)
    return names


def norm_changes(module, names):
    """What to set on the norms of these names so that they are one operation: [(part, {"forward": function})]."""
    return [(part, {"forward": _one_operation(part)}) for part in map(module.get_submodule, names)]


def _one_operation(part):
    eps = norm_eps(part)

    def forward(hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, part.weight.shape, part.weight, eps)

    return forward
