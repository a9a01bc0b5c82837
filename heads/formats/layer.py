"""Read and write the decoder layer of EAGLE files: sizes are in its tensors, the rest in a Llama's config.json.

`read_layer` gives LayerConfig's fields, `layer_keys` the config's. Rope has two spellings, `rope_theta` and
`rope_scaling`, or `rope_parameters` with both; either is read, both are written. This file touches no disk.
"""

from importlib.metadata import version

import torch
from huggingface_hub.errors import StrictDataclassError

from ..layers import rope_frequencies
from ..storage.reading import assume, compare
from ..storage.tensor_checks import shape_of

DEFAULT_THETA = 10000.0  # published EAGLE-3 heads name none and were trained with this
# Defaults of transformers' LlamaConfig, for keys that a file lacks.
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


def read_layer(tensors, prefix, config, hidden_size, notes, num_layers=1):
    """LayerConfig's fields of a file, except hidden size and vocabulary: {name: value}. Tensors decide; the config fills gaps.

    tensors: the file's; prefix: of the (first) layer's names in it; config: the Llama's config.json as a dict; notes: a list of
    str to add to (heads/storage/reading.py); num_layers: by the tensors. Raises ValueError naming the tensor or the key.
    """
    head_dim, num_heads, num_kv_heads = _read_heads(tensors, prefix, config, hidden_size, notes)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f'config.json says "hidden_act": {config["hidden_act"]!r}, expected "silu"')
    intermediate_size = shape_of(tensors, f"{prefix}mlp.gate_proj.weight")[0]
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": num_layers}
    for key, found in (sizes | {"num_key_value_heads": num_kv_heads}).items():
        compare(notes, config, key, found)
    biased = any(f"{prefix}self_attn.{one}_proj.bias" in tensors for one in "qkv")
    _compare_biases(config, biased, notes)
    theta, scaling = read_rope(config)
    if theta is None:
        assume(notes, "rope_theta", theta := DEFAULT_THETA, "with which published heads were trained")
    says = {key: value for key in DEFAULTS if (value := config.get(key)) is not None}
    if "rms_norm_eps" not in says:
        assume(notes, "rms_norm_eps", DEFAULTS["rms_norm_eps"], "as transformers does")
    if "max_position_embeddings" not in says and scaling:  # only rope scaling reads it
        assume(notes, "max_position_embeddings", DEFAULTS["max_position_embeddings"], "as transformers does")
    steps = config.get("num_speculative_tokens")
    return {
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": biased,
        "base_model_name_or_path": config.get("base_model_name_or_path") or "",
        **DEFAULTS,
        **says,
        **({} if steps is None else {"num_speculative_tokens": steps}),
    }


def _read_heads(tensors, prefix, config, hidden_size, notes):
    """(head dimension, query heads, key-value heads), from the rows of two tensors and up to three numbers in the config.

    Where the config lacks the head dimension, it is hidden size / query heads, unless both numbers of heads imply another.
    """
    query, key = (f"{prefix}self_attn.{one}_proj" for one in ("q", "k"))
    q_rows, kv_rows = (shape_of(tensors, f"{name}.weight")[0] for name in (query, key))
    said, num_heads = config.get("head_dim"), config.get("num_attention_heads")
    head_dim = said or (hidden_size // num_heads if type(num_heads) is int and num_heads > 0 else None)
    if type(head_dim) is not int or head_dim < 1:
        raise ValueError(
            f'config.json must say "head_dim" or "num_attention_heads"; it says {said!r} and {num_heads!r}'
        )
    kv_heads = config.get("num_key_value_heads")
    if (
        not said
        and q_rows != num_heads * head_dim
        and type(kv_heads) is int
        and q_rows * kv_heads == kv_rows * num_heads
    ):
        head_dim = q_rows // num_heads
        assume(notes, "head_dim", head_dim, f"by the {q_rows} and {kv_rows} rows of the tensors' q and k")
    for name, rows in ((query, q_rows), (key, kv_rows)):
        if rows % head_dim:
            raise ValueError(
                f"tensor {name}.weight has {rows} rows, expected a multiple of the head dimension {head_dim}"
            )
    if num_heads not in (None, q_rows // head_dim):
        raise ValueError(
            f'config.json says "num_attention_heads": {num_heads!r}, the {q_rows} rows of {query}.weight are '
            f"{q_rows // head_dim} heads of {head_dim}"
        )
    return head_dim, q_rows // head_dim, kv_rows // head_dim


def _compare_biases(config, biased, notes):
    """Note where config and tensors disagree on biases. Two keys mean a bias of q, k and v; a Qwen2 has it without a key."""
    said = config.get("qkv_bias") or config.get("attention_bias")
    if said and not biased:
        notes.append("config.json says that q, k and v have a bias; the tensors hold none")
    if biased and not said and not str(config.get("model_type")).startswith("qwen2"):
        notes.append('config.json says no "qkv_bias"; the tensors hold a bias of q, k and v')
    if config.get("mlp_bias"):
        notes.append('config.json says "mlp_bias": True; the tensors hold none')


def read_rope(config):
    """(theta or None, scaling or None) of a config.json in either spelling; ValueError where the two say different things."""
    parts = [config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"config.json's rope_parameters and rope_scaling must be objects, got {parts}")
    for part in (config, *parts):
        if part.get("partial_rotary_factor") not in (None, 1.0):
            raise ValueError(
                f'config.json says "partial_rotary_factor": {part["partial_rotary_factor"]!r}; only 1.0 is supported'
            )
    thetas = [theta for part in (config, *parts) if (theta := part.get("rope_theta")) is not None]
    if wrong := [theta for theta in thetas if type(theta) not in (int, float)]:
        raise ValueError(f'config.json says "rope_theta": {wrong[0]!r}, expected a number')
    thetas = sorted({*thetas})
    if len(thetas) > 1:
        raise ValueError(f"config.json says rope_theta twice and differently: {', '.join(map(str, thetas))}")
    said_elsewhere, scalings = ("rope_theta", "type", "partial_rotary_factor"), []
    for part in parts:
        scaling = {key: value for key, value in part.items() if key not in said_elsewhere}
        scaling.setdefault("rope_type", part.get("type", "default"))
        if scaling["rope_type"] != "default" and scaling not in scalings:
            scalings.append(scaling)
    if len(scalings) > 1:
        raise ValueError(f"config.json scales rope twice and differently: {scalings[0]} and {scalings[1]}")
    return float(thetas[0]) if thetas else None, scalings[0] if scalings else None


def check_rope(shape):
    """ValueError if the rope scaling of a LayerConfig lacks what its type needs."""
    try:
        rope_frequencies(shape)
    except (KeyError, TypeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ValueError(f"config.json's rope scaling {shape.rope_scaling} is not complete: {error}") from None


def layer_keys(shape):
    """A LayerConfig as keys of a Llama's config.json, including every key that a reader would guess if it were missing."""
    return {
        "model_type": "llama",
        "base_model_name_or_path": shape.base_model_name_or_path,
        "num_hidden_layers": 1,
        **{key: getattr(shape, key) for key in ("hidden_size", "vocab_size", "intermediate_size", "head_dim")},
        **{key: getattr(shape, key) for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")},
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        # attention_bias would ask readers for a bias of o_proj, too; vLLM knows this key for q, k and v alone.
        "attention_bias": False,
        **({"qkv_bias": True} if shape.attention_bias else {}),
        "mlp_bias": False,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "rope_parameters": shape.rope_parameters,
        # Even if the target ties: SGLang would put the embedding in the place of lm_head.
        "tie_word_embeddings": False,
        "num_speculative_tokens": shape.num_speculative_tokens,
        "transformers_version": version("transformers"),
    }


def shapes_of(kind, shape):
    """{our tensor name: its shape} of a head, without making it.  kind: its class; shape: its config"""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in kind(shape).state_dict().items()}


def vocab_size_of(tensors, config, notes):
    """The target's vocabulary size: the rows of embed_tokens or the length of t2d, else the config's."""
    for name, axes in (("embed_tokens.weight", 2), ("t2d", 1)):
        if name in tensors:
            size = shape_of(tensors, name, axes)[0]
            compare(notes, config, "vocab_size", size, f"tensor {name}")
            return size
    said = config.get("vocab_size")
    if type(said) is not int:
        raise ValueError(
            f'no tensor tells the target\'s vocabulary, so config.json must say "vocab_size"; it says {said!r}'
        )
    return said
