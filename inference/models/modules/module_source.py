"""Modules of transformers: without weights, with random ones, or loaded."""

import copy

import torch

from ....heads.storage.hub_answer import hub_options
from ....heads.storage.remote_code import is_remote
from ..architectures import UnsupportedArchitecture
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


def random_module(config, dtype, device):
    """A module of a config's shape with random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    check_memory(parameter_bytes(config, dtype), dtype, device)
    with device:
        own = is_remote(type(config))
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=own).eval()


def load_module(folder_or_id, config, dtype, device):
    """The module of a folder or Hub id, on the device."""
    from transformers import AutoModelForCausalLM

    check_memory(parameter_bytes(config, dtype), dtype, device)
    # Each tensor goes to a GPU as it is read.
    place = {"device_map": {"": device}} if device.type == "cuda" else {}
    place |= hub_options(folder_or_id) | {"trust_remote_code": is_remote(type(config))}
    return AutoModelForCausalLM.from_pretrained(folder_or_id, dtype=dtype, **place)
