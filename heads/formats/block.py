"""On-disk format of block drafters: "dflash", z-lab's, which SGLang and vLLM read too.

Tensors have the names of heads/block.py, and all must be there; embedding and lm_head are the target's and not in the file.
config.json holds a Qwen3's keys, block_size, and dflash_config with mask_token_id and target_layer_ids. Id i there is the output of
the target's layer i, which is our aux layer i + 1, the stream entering the next one. dflash_config may hold block_size too.

Refused, by the tensor or key that tells: the dialects of speculators and DeepSpec, DSpark's and DFlash2's parts, sliding windows.

This file touches no disk.
"""

from ..block import BlockConfig, BlockHead
from ..storage.reading import Reading, compare
from ..storage.tensor_checks import check_tensors, shape_of
from .layer import check_rope, layer_keys, read_layer, shapes_of, vocab_size_of

FORMATS = ("dflash",)
CONFIG_NAMES = ("DFlashDraftModel",)
EMBEDDING = "embed_tokens.weight"
# Parts of tensors' names that tell of another member of the family, or of another dialect.
OTHERS = {
    "markov_head.": "DSpark's edge",
    "confidence_head.": "DSpark's confidence",
    "candidate_selector.": "DFlash2's selector",
    "attention_conv.": "DFlash2's convolution",
    "mlp_conv.": "DFlash2's convolution",
    "prefix_gru.": "Domino's correction",
    "lm_head.": "the dialect of speculators or DeepSpec",
    "embed_tokens.": "the dialect of speculators or DeepSpec",
    "d2t": "the dialect of speculators",
    "t2d": "the dialect of speculators",
}
# Keys of config.json or dflash_config that change the formulas, and the value that does not.
NEUTRAL = {
    "sample_from_anchor": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "use_sliding_window": False,
}


def recognises(names):
    """Whether a file with tensors of these names holds a block drafter. EAGLE-3's have much the same names: try this first."""
    return "hidden_norm.weight" in names or any(
        name.startswith(("markov_head.", "candidate_selector.")) for name in names
    )


def native_format(head):
    return "dflash"


def check_format(head, format):
    return format


def to_file(head, format="dflash", lm_head_weight=None):
    """`head` as a file: ({name: tensor}, config dict)."""
    state = {name: tensor for name, tensor in head.state_dict().items() if name != EMBEDDING}
    config = head.config
    keys = {
        "architectures": ["DFlashDraftModel"],
        **layer_keys(config),
        "model_type": "qwen3",
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "is_causal": config.is_causal,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [id - 1 for id in config.aux_layer_ids],
        },
    }
    if config.num_target_layers is not None:
        keys["num_target_layers"] = config.num_target_layers
    return {name: tensor.cpu().contiguous() for name, tensor in state.items()}, keys


def from_file(tensors, config):
    """Read a file's tensors: Reading of a BlockConfig, its state without embed_tokens.

    tensors: {name: tensor} as the file holds them; config: its config.json as a dict. Raises ValueError naming tensors that are
    missing, unexpected, misshapen or not floating point, and config keys that are missing, do not fit or ask for other formulas.
    """
    notes, nested = [], config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f'config.json says "dflash_config": {nested!r}, expected an object')
    _check_kind(tensors, config, nested)
    hidden_size, width = shape_of(tensors, "fc.weight")
    ids = _said(config, nested, "target_layer_ids")
    if not isinstance(ids, list) or not ids or any(type(id) is not int for id in ids):
        raise ValueError(f'config.json must say "target_layer_ids" in dflash_config, a list of layers; it says {ids!r}')
    if width != len(ids) * hidden_size:
        raise ValueError(
            f"tensor fc.weight has {width} columns, expected {len(ids) * hidden_size}: target_layer_ids names {len(ids)} layers, "
            f"each {hidden_size} wide"
        )
    num_layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    layer = read_layer(tensors, "layers.0.", config, hidden_size, notes, num_layers)
    size = _whole_number(config, nested, "block_size", least=2)
    compare(notes, config, "num_speculative_tokens", size - 1, "block_size")
    depth = config.get("num_target_layers")
    shape = BlockConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size_of(tensors, config, notes),
        num_hidden_layers=num_layers,
        mask_token_id=_whole_number(config, nested, "mask_token_id", least=1),
        aux_layer_ids=tuple(id + 1 for id in ids),
        is_causal=_is_causal(config, nested),
        num_target_layers=depth if type(depth) is int else None,
        **layer | {"num_speculative_tokens": size - 1, "attention_bias": False},
    )
    check_rope(shape)
    expected = shapes_of(BlockHead, shape)
    del expected[EMBEDDING]
    check_tensors(tensors, expected)
    return Reading(shape, dict(tensors), "dflash", notes)


def _said(config, nested, key):
    """The value of a key of dflash_config, which may stand beside it instead; None if it is in neither."""
    return config.get(key) if nested.get(key) is None else nested[key]


def _whole_number(config, nested, key, least):
    said = _said(config, nested, key)
    if type(said) is not int or said < least:
        raise ValueError(
            f'config.json must say "{key}", at its top or in dflash_config: a whole number of at least {least}; it says {said!r}'
        )
    return said


def _is_causal(config, nested):
    """What config.json says; layers without a window are not causal by default, as z-lab and vLLM take them."""
    said = {"is_causal": config.get("is_causal"), "causal": nested.get("causal")}
    found = [value for value in said.values() if value is not None]
    if any(type(value) is not bool for value in found) or len({*found}) > 1:
        raise ValueError(f"config.json must say is_causal or dflash_config's causal, true or false; it says {said}")
    return bool(found and found[0])


def _check_kind(tensors, config, nested):
    """ValueError for other members of the family and other dialects, naming the tensor or the key."""
    for name in tensors:
        for part, what in OTHERS.items():
            if name.startswith(part) or f".{part}" in name:
                raise ValueError(
                    f"tensor {name} belongs to {what}, which is not read yet: expected z-lab's DFlash alone"
                )
    if "speculators_model_type" in config:
        raise ValueError(
            f'config.json says "speculators_model_type": {config["speculators_model_type"]!r}: of block drafters only z-lab\'s '
            "files are read yet"
        )
    for key, neutral in NEUTRAL.items():
        if (said := _said(config, nested, key)) not in (None, neutral):
            raise ValueError(f'config.json says "{key}": {said!r}; only {neutral!r} is supported')
    if other := sorted({*map(str, config.get("layer_types") or ())} - {"full_attention"}):
        raise ValueError(f'config.json says "layer_types" with {", ".join(other)}; only full_attention is supported')
