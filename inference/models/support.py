"""Which decoder runs a target: the packed one for Llama-like models, else the module's own, or none, and why."""

from . import weights
from .architectures import UnsupportedArchitecture
from .decoder import Decoder, check_packed
from .modules.module_decoder import ModuleDecoder
from .modules.module_source import on_meta, parameter_bytes
from .modules.module_trial import trial

MOST_POSITIONS = 1 << 20  # no model is as long
MOST_REMEMBERED = 32
_tried = {}  # {config of a module that can run: True}, the newest last: one start asks several times


def decoder_class(config):
    """The class of decoder that runs a target with this Hugging Face config, or UnsupportedArchitecture, saying what is in the way.

    A module without weights runs once for each config, which takes a second for a large model.
    """
    if quantised := getattr(config, "quantization_config", None):
        how = quantised if isinstance(quantised, dict) else quantised.to_dict()
        raise UnsupportedArchitecture(
            f"the engine does not run quantised weights yet ({how.get('quant_method')}): give the model in 16 or 32 bits"
        )
    try:
        check_packed(config)
    except UnsupportedArchitecture:
        limit = getattr(config, "max_position_embeddings", None)
        _check_module(config, limit or MOST_POSITIONS)
        if limit is None:
            raise UnsupportedArchitecture(
                f"the engine cannot run {config.model_type} models as they are: their config says no max_position_embeddings"
            ) from None
        return ModuleDecoder
    return Decoder


def _check_module(config, limit):
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _tried:
        trial(on_meta(config), limit)
        _tried[key] = True
        if len(_tried) > MOST_REMEMBERED:
            del _tried[next(iter(_tried))]


def check_supported(config):
    """Raise UnsupportedArchitecture if the engine cannot run a target with this Hugging Face config."""
    decoder_class(config)


def weight_bytes(config, dtype):
    """Bytes of the weights of a target that the engine runs."""
    how = weights.weight_bytes if decoder_class(config) is Decoder else parameter_bytes
    return how(config, dtype)
