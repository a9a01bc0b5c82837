"""On-disk formats of EAGLE-1 and EAGLE-2 heads (the same weights), in the two dialects of today's readers.

    eagle-vllm     vLLM: architectures ["LlamaForCausalLM"], no fc.bias; it guesses the method from "eagle-" in the path
    eagle-sglang   SGLang: architectures ["LlamaForCausalLMEagle"], fc.bias always there (zeros for a head that has none)

Tensors have the names of heads/eagle.py, and all must be there. embed_tokens is left out where it is the target's
(Eagle.take_embedding), as in published files: both readers take the target's own. Published files hold fc.bias whatever their
config says: tensors decide. No format holds an lm_head or a final norm.

This file touches no disk.
"""

import torch

from ..eagle import Eagle, EagleConfig
from ..storage.reading import Reading, listed
from ..storage.tensor_checks import DTYPES, check_tensors, shape_of
from .layer import check_rope, layer_keys, read_layer, shapes_of, vocab_size_of

ARCHITECTURES = {"eagle-vllm": "LlamaForCausalLM", "eagle-sglang": "LlamaForCausalLMEagle"}
FORMATS = tuple(ARCHITECTURES)
CONFIG_NAMES = (
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
)  # LlamaForCausalLM tells nothing: every EAGLE has this name
EMBEDDING = "embed_tokens.weight"


def recognises(names):
    """Whether a file with tensors of these names holds an EAGLE-1 head. EAGLE-3 files have these and more: try them first."""
    if any(name.startswith("layers.1.") for name in names):
        return False
    norms = [f"layers.0.{name}_layernorm.weight" in names for name in ("input", "post_attention")]
    return ("fc.weight" in names and any(name.startswith("layers.0.") for name in names)) or norms == [False, True]


def native_format(head):
    return "eagle-sglang" if head.config.fc_bias else "eagle-vllm"


def check_format(head, format):
    """ValueError where vLLM's dialect would lose the bias of fc."""
    if format == "eagle-vllm" and head.config.fc_bias:
        raise ValueError("format 'eagle-vllm' has no fc.bias, which this head has: use 'eagle-sglang'")
    return format


def to_file(head, format, lm_head_weight=None):
    """`head` as a file: ({name: tensor}, config dict)."""
    state = dict(head.state_dict())
    if head.embedding_is_targets:
        del state[EMBEDDING]
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    if format == "eagle-sglang" and "fc.bias" not in tensors:
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0]).contiguous()
    # "bias": false means fc to the original reader, and the attention to others.
    return tensors, {"architectures": [ARCHITECTURES[format]], "bias": False, **layer_keys(head.config)}


def from_file(tensors, config):
    """Read a file's tensors: Reading of an EagleConfig, its state without embed_tokens where the file has none.

    tensors: {name: tensor} as the file holds them; config: its config.json as a dict. Raises ValueError naming tensors that are
    missing, unexpected, misshapen or not floating point, and config keys that are missing or do not fit.
    """
    tensors, notes = dict(tensors), []
    dialect = "eagle-sglang" if "fc.bias" in tensors else "eagle-vllm"
    rows, columns = shape_of(tensors, "fc.weight")
    if columns != 2 * rows:
        raise ValueError(
            f"tensor fc.weight is {(rows, columns)}, expected {(rows, 2 * rows)}: embedding and feature side by side"
        )
    bias = tensors.get("fc.bias")
    if bias is not None and bias.dtype in DTYPES and tuple(bias.shape) == (rows,) and not bias.any():
        del tensors["fc.bias"]  # zeros: how SGLang's dialect writes a head without a bias
    _compare_bias(config, "fc.bias" in tensors, dialect, notes)
    shape = EagleConfig(
        hidden_size=rows,
        vocab_size=vocab_size_of(tensors, config, notes),
        fc_bias="fc.bias" in tensors,
        **read_layer(tensors, "layers.0.", config, rows, notes),
    )
    check_rope(shape)
    expected = shapes_of(Eagle, shape)
    if EMBEDDING not in tensors:
        del expected[EMBEDDING]
    check_tensors(tensors, expected)
    return Reading(shape, tensors, dialect, notes)


def _compare_bias(config, biased, dialect, notes):
    """The original code makes fc.bias unless "bias" is false; SGLang's class always has one, whatever the key says."""
    if (
        biased
        and config.get("bias") is False
        and ARCHITECTURES["eagle-sglang"] not in listed(config.get("architectures"))
    ):
        notes.append('config.json says "bias": False; the tensors hold fc.bias')
    if dialect == "eagle-vllm" and config.get("bias") is not False:
        notes.append('config.json does not say "bias": False; the tensors hold no fc.bias')
