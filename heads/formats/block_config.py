"""config.json of block drafters, in the layouts of block.py: what its keys say, and how they are written.

Layers are counted in two ways. Id i of target_layer_ids is the output of the target's layer i (-1: the embedding), which is our aux
layer i + 1, the stream entering the next one; aux_hidden_state_layer_ids are ours. Whether slot i predicts the token at its own
place or the next one (sample_from_anchor) is a key in newer files. Where it is missing, DSpark's files predict the next one, by
their name, and DFlash's do not.

Sliding layers (layer_types, sliding_window and use_sliding_window, as a Qwen3 has them):

    dflash        is_causal, or dflash_config's causal, is said of all layers. Where neither is there, sliding layers are causal,
                  as SpecForge trains them and vLLM and z-lab's code run them, and full ones are not; z-lab's code before 2026-08
                  let no layer be. A window counts from the slot, as transformers counts it
    speculators   sliding layers are causal unless sliding_window_non_causal, full ones never; a window counts from the block

Scales and caps (SCALES) are read as z-lab's code reads them, in dflash_config or at the top; vLLM reads those in dflash_config, of
DFlash2 alone, and DeepSpec a cap at the top. Where nothing is said there is none.

This file touches no disk.
"""

import math
from typing import Any, NamedTuple

from ..storage.reading import assume, listed
from .layer import layer_keys

# Our own keys, beside the Qwen3's: a tensor of that name is a copy of the target's; what the format "dflash" has no key for.
TARGETS_EMBEDDING, TARGETS_LM_HEAD = "embed_tokens_is_targets", "lm_head_is_targets"
SLIDING_IS_CAUSAL, WINDOW_OF_BLOCK = "sliding_is_causal", "window_of_block"
# speculators_model_type: the architecture
SPECULATORS = {"dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
ANCHORED = ("DSparkDraftModel", "Qwen3DSparkModel")  # architectures whose slots predict the next token
KINDS = ("full_attention", "sliding_attention")
# Keys of numbers that change the formulas (heads/block.py), and the value that does not.
SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
# Those that are not supported. vLLM scales logits and the edge by logit_scale.
NEUTRAL = {
    "logit_scale": 1.0,
    "use_swa": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "is_neox_style": True,
    "markov_head_type": "vanilla",
}


class Keys(NamedTuple):
    """What a config.json says."""

    format: str
    layer: dict  # the Qwen3's keys
    said: dict  # those of the block drafter
    block_size: int
    mask_token_id: int
    aux_layer_ids: tuple
    ids_key: str  # where these are said
    places: dict  # BlockConfig's fields that say how far slots see
    scales: dict  # BlockConfig's fields of SCALES
    sample_from_anchor: bool
    num_target_layers: Any  # None: not said


def read_keys(tensors, config, notes):
    """The Keys of a config.json. ValueError naming a key that is missing, does not fit or asks for other formulas.

    tensors: the names in the file; notes: a list of str to add to (heads/storage/reading.py)
    """
    nested = _object(config, "dflash_config")
    said = config | {key: value for key, value in nested.items() if value is not None}
    if "speculators_model_type" in config:
        format, ids_key, less = "speculators", "aux_hidden_state_layer_ids", 0
        layer = _speculators_layer(config)
    else:
        flat = not nested and "lm_head.weight" in tensors
        format, ids_key, less = "deepspec" if flat else "dflash", "target_layer_ids", 1
        layer = said
    for key, neutral in NEUTRAL.items():
        if (value := said.get(key, layer.get(key))) not in (None, neutral):
            raise ValueError(f'config.json says "{key}": {value!r}; only {neutral!r} is supported')
    anchored, depth = _sample_from_anchor(config, said, tensors, notes), layer.get("num_target_layers")
    return Keys(
        format,
        layer,
        said,
        block_size=whole_number(said, "block_size", least=1 if anchored else 2),
        mask_token_id=whole_number(said, "mask_token_id", least=1),
        aux_layer_ids=_layer_ids(said, ids_key, less),
        ids_key=ids_key,
        places=_places(format, config, nested, layer, notes),
        scales=_scales(format, said, layer),
        sample_from_anchor=anchored,
        num_target_layers=depth if type(depth) is int else None,
    )


def _object(config, key):
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f'config.json says "{key}": {found!r}, expected an object')
    return found


def _speculators_layer(config):
    """The Qwen3's keys of a speculators config, with the target's name as plain files have it."""
    kind = config["speculators_model_type"]
    if kind not in SPECULATORS:
        known = ", ".join(f'"{one}"' for one in SPECULATORS)
        raise ValueError(f'config.json says "speculators_model_type": {kind!r}, expected one of {known}')
    layer, verifier = (
        _object(config, "transformer_layer_config"),
        _object(_object(config, "speculators_config"), "verifier"),
    )
    if not layer:
        raise ValueError(
            "config.json is not a speculators config: expected transformer_layer_config with a Qwen3's keys"
        )
    return layer | {"base_model_name_or_path": verifier.get("name_or_path")}


def _layer_ids(said, key, less):
    ids = said.get(key)
    if not isinstance(ids, list) or not ids or any(type(id) is not int for id in ids):
        where = " in dflash_config" if less else ""
        raise ValueError(f'config.json must say "{key}"{where}, a list of layers; it says {ids!r}')
    return tuple(id + less for id in ids)


def whole_number(said, key, least):
    """A key's value; ValueError if it is missing or less than `least`.  said: as in Keys"""
    value = said.get(key)
    if type(value) is not int or value < least:
        raise ValueError(
            f'config.json must say "{key}", at its top or in dflash_config: a whole number of at least {least}; it says {value!r}'
        )
    return value


def _scales(format, said, layer):
    """The values of SCALES."""
    found = {}
    for key, neutral in SCALES.items():
        value = said.get(key, layer.get(key))
        if value is None:
            continue
        if format == "speculators" and value != neutral:
            raise ValueError(
                f'config.json says "{key}": {value!r}; in the layout of the speculators library, which has no such key, only '
                f"{neutral!r} is supported"
            )
        number = type(value) in (int, float) and 0 <= value < math.inf
        if not number or (value == 0 and neutral):
            least = "above" if neutral else "of at least"
            raise ValueError(f'config.json says "{key}": {value!r}, expected a number {least} 0')
        found[key] = float(value)
    return found


def _places(format, config, nested, layer, notes):
    """How far slots see: see above."""
    layers, window = _sliding_layers(layer)
    if format == "speculators":
        found = {"is_causal": False, "sliding_is_causal": not config.get("sliding_window_non_causal")}
    else:
        said = _is_causal(config, nested)
        if said is None and layers and not config.get(SLIDING_IS_CAUSAL):
            assume(
                notes,
                "is_causal",
                True,
                "of sliding layers, as SpecForge trains and vLLM runs them; z-lab's code before 2026-08 says False",
            )
        found = {"is_causal": bool(said), "sliding_is_causal": said in (None, True)}
    if not layers:
        return {"is_causal": found["is_causal"]}
    of_block = format == "speculators" or config.get(WINDOW_OF_BLOCK) is True
    return found | {"sliding_layers": layers, "sliding_window": window, "window_of_block": of_block}


def _sliding_layers(layer):
    """(numbers of the layers with a window, the window) by the Qwen3's keys."""
    kinds, uses, window = layer.get("layer_types") or [], layer.get("use_sliding_window"), layer.get("sliding_window")
    if not isinstance(kinds, list) or {*kinds} - {*KINDS}:
        raise ValueError(f'config.json says "layer_types": {kinds!r}, expected a list of {" and ".join(KINDS)}')
    layers = tuple(i for i, kind in enumerate(kinds) if kind == KINDS[1])
    if bool(layers) != bool(uses) or (layers and (type(window) is not int or window < 1)):
        raise ValueError(
            f'config.json says "use_sliding_window": {uses!r} and "sliding_window": {window!r} beside {len(layers)} layers of '
            f"{KINDS[1]} in layer_types: readers differ in which of these counts; expected all of them, or none"
        )
    if layers and (own := layer.get("swa_window_size")) not in (None, window):
        raise ValueError(
            f'config.json says "sliding_window": {window!r} and "swa_window_size": {own!r}: readers differ in which of them '
            "counts; expected the same number"
        )
    return layers, window if layers else None


def _is_causal(config, nested):
    """What config.json says of all layers; None: nothing."""
    said = {"is_causal": config.get("is_causal"), "causal": nested.get("causal")}
    found = [value for value in said.values() if value is not None]
    if any(type(value) is not bool for value in found) or len({*found}) > 1:
        raise ValueError(f"config.json must say is_causal or dflash_config's causal, true or false; it says {said}")
    return found[0] if found else None


def _sample_from_anchor(config, said, tensors, notes):
    value, size = said.get("sample_from_anchor"), said.get("block_size")
    if type(value) is bool:
        return value
    if value is not None:
        raise ValueError(f'config.json says "sample_from_anchor": {value!r}, expected true or false')
    methods = _object(config, "speculators_config").get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens") if isinstance(methods[0], dict) else None
    if type(size) is int and count in (size - 1, size):
        if (count == size) == (config.get("speculators_model_type") != "dspark"):
            assume(
                notes, "sample_from_anchor", count == size, f"by its {count} speculative_tokens of a block_size {size}"
            )
        return count == size
    named = any(name in ANCHORED for name in listed(config.get("architectures")))
    dspark = config.get("speculators_model_type") == "dspark" or said.get("projector_type") == "dspark"
    return named or dspark or any(name.startswith("markov_head.") for name in tensors)


def scales_of(config):
    """The fields of SCALES that a head has, and their values."""
    return {key: value for key, neutral in SCALES.items() if (value := getattr(config, key)) != neutral}


def plain_config(config):
    """config.json in the format dflash. Keys of DSpark stand at the top, where vLLM and SGLang look, and in dflash_config.

    Those of DFlash2 are in dflash_config alone, as in z-lab's files, and block_size is there too.
    """
    kind = _member(config)
    ids = {"mask_token_id": config.mask_token_id, "target_layer_ids": [id - 1 for id in config.aux_layer_ids]}
    scales = scales_of(config)
    dspark = ids | _part_keys(config) | scales if kind == "dspark" else {}
    nested = ids | _part_keys(config) | scales
    if kind == "dspark":
        nested["projector_type"] = "dspark"
    if kind == "dflash2":
        nested["block_size"] = config.block_size
    if config.sample_from_anchor or kind == "dspark":  # in files without it readers take what their name says
        nested["sample_from_anchor"] = config.sample_from_anchor
    names = {"dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel", "dflash": "DFlashDraftModel"}
    keys = {
        "architectures": [names[kind]],
        **_layer(config),
        **(
            {SLIDING_IS_CAUSAL: True}
            if config.sliding_is_causal and not config.is_causal
            else {"is_causal": config.is_causal}
        ),
        **({WINDOW_OF_BLOCK: True} if config.window_of_block else {}),
        "block_size": config.block_size,
        **dspark,
        "dflash_config": nested,
    }
    if config.draft_vocab_size is not None:
        keys["draft_vocab_size"] = config.draft_vocab_size
    return keys


def speculators_config(config, embedding_is_targets):
    """config.json in the format speculators."""
    kind = _member(config)
    layer = _layer(config)
    layer |= {TARGETS_EMBEDDING: True} if embedding_is_targets else {}
    layer |= {TARGETS_LM_HEAD: True} if config.draft_vocab_size is None else {}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_speculative_tokens}
    return {
        "architectures": [SPECULATORS[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "draft_vocab_size": config.num_scores,
        "target_hidden_size": config.hidden_size,
        "sliding_window_non_causal": bool(config.sliding_layers) and not config.sliding_is_causal,
        "sample_from_anchor": config.sample_from_anchor,
        **_part_keys(config),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": layer.pop("base_model_name_or_path"), "architectures": []},
        },
        "transformers_version": layer.pop("transformers_version"),
        "transformer_layer_config": layer,
    }


def _layer(config):
    depth = {} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}
    count = config.num_hidden_layers
    kinds = [KINDS[i in config.sliding_layers] for i in range(count)]
    own = {"model_type": "qwen3", "num_hidden_layers": count, "layer_types": kinds}
    if config.sliding_layers:
        own |= {"use_sliding_window": True, "sliding_window": config.sliding_window}
    return layer_keys(config) | own | depth


def _member(config):
    """Which member of the family a head is, by its parts."""
    if config.edge_rank or config.confidence:
        return "dspark"
    return "dflash2" if config.selector_rank or config.conv_kernel_size else "dflash"


def _part_keys(config):
    """The keys of a member's parts."""
    if _member(config) == "dspark":
        return {
            "markov_rank": config.edge_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence and config.confidence_sees_token,
        }
    selector = {"selector_rank": config.selector_rank, "selector_top_k": config.selector_top_k}
    convolution = {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
    return (selector if config.selector_rank else {}) | (convolution if config.conv_kernel_size else {})
