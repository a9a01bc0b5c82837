"""Modules of transformers: without weights, with random ones, or loaded."""

import copy

import torch
from torch import nn

from ....heads.storage.hub_answer import hub_options
from ....heads.storage.remote_code import is_remote
from ..architectures import UnsupportedArchitecture
from ..division import WHOLE
from ..memory import check_memory


def on_meta(config):
    """The *ForCausalLM of a config, without weights. Raises UnsupportedArchitecture if transformers has none."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            own = is_remote(type(config))
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=own).eval()
    except (ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise UnsupportedArchitecture(
            f"the engine does not run model type {config.model_type!r}: transformers gives no module of it that generates text "
            f"({str(error).strip().partition(chr(10))[0][:200]})"
        ) from error


def parameter_bytes(config, dtype):
    """Bytes of the parameters of a config's module in dtype, shared ones once."""
    return dtype.itemsize * sum(parameter.numel() for parameter in on_meta(config).parameters())


def random_module(config, dtype, device, division=WHOLE):
    """A module of a config's shape with random weights, made on the device: the same for all divisions.

    Normal with deviation K^-1/2 over their K inputs, as a packed decoder's; what is not a weight is one, biases have deviation
    0.02. Of a division (FeatureDivision) parts of experts are on the device, and everything else on the CPU, from where it takes
    its part.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    _check_fits(config, dtype, device, division)
    with init_empty_weights():  # buffers are computed
        own = is_remote(type(config))
        module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=own).eval()
    generator, made = torch.Generator(device).manual_seed(0), {}
    for part in module.modules():
        for name, empty in part.named_parameters(recurse=False):
            if id(empty) not in made:
                weight = nn.Parameter(torch.empty_like(empty, device=device), requires_grad=False)
                _fill(weight.data, name, generator)
                if division is not WHOLE:
                    held = division.take_experts(part, name, weight, device)
                    weight = nn.Parameter(weight.data.cpu(), requires_grad=False) if held is None else held
                made[id(empty)] = empty, weight
            setattr(part, name, made[id(empty)][1])
    module.tie_weights()
    return module if division is not WHOLE else module.to(device)


def _fill(weight, name, generator):
    if weight.dim() > 1:
        weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    elif name.endswith("bias"):
        weight.normal_(std=0.02, generator=generator)
    else:
        weight.fill_(1)


def load_module(folder_or_id, config, dtype, device, division=WHOLE):
    """The module of a folder or Hub id, on the device.

    Of a division (FeatureDivision) parts of experts are on the device, and everything else on the CPU: tensors of files, of which
    only what it takes is read.
    """
    from transformers import AutoModelForCausalLM

    _check_fits(config, dtype, device, division)
    options = hub_options(folder_or_id) | {"trust_remote_code": is_remote(type(config))}
    if division is not WHOLE:
        with division.taking_experts(device):
            return AutoModelForCausalLM.from_pretrained(folder_or_id, dtype=dtype, **options)
    # Each tensor goes to a GPU as it is read.
    place = {"device_map": {"": device}} if device.type == "cuda" else {}
    return AutoModelForCausalLM.from_pretrained(folder_or_id, dtype=dtype, **place, **options)


def _check_fits(config, dtype, device, division):
    needed = parameter_bytes(config, dtype) if division is WHOLE else division.held_bytes(on_meta(config), dtype)
    check_memory(needed, dtype, device)
