"""On-disk formats of EAGLE-3 heads.

    eagle3        the plain layout: the original code, SGLang, vLLM
    speculators   Red Hat's speculators and vLLM: the layer is called layers.0, the Llama's keys lie in transformer_layer_config,
                  and the target's embedding comes along

Tensors have the names of heads/eagle3.py, except for the layer's prefix (LAYER), and all must be there. Files are read with either
name of the layer in either format; with d2t alone; without d2t and t2d, where the draft vocabulary is the whole one; with or
without embed_tokens (without, it is the target's: Eagle3.take_embedding). Aux layers are stored in two ways, and both are written:
at the top level of config.json id k is the stream entering layer k (vLLM, speculators), in eagle_config (SGLang) the same stream is
k - 1. A file with neither means the layers of published heads, which follow from the target's depth (Eagle3.take_depth).

This file touches no disk.
"""

from itertools import product

from ..draft_vocabulary import read_draft_vocabulary
from ..eagle3 import Eagle3, Eagle3Config
from ..storage.reading import Reading, assume, compare
from ..storage.tensor_checks import check_tensors, shape_of
from .layer import check_rope, layer_keys, read_layer, shapes_of, vocab_size_of

LAYER = {"eagle3": "midlayer.", "speculators": "layers.0."}  # our "midlayer." as the format calls it
FORMATS = tuple(LAYER)
CONFIG_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel")
EMBEDDING = "embed_tokens.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Our own key: says that embed_tokens in a speculators file is the target's, so plain files need none.
TARGETS_EMBEDDING = "embed_tokens_is_targets"
# Variants of the speculators library. vLLM knows them in plain files, too; no tensor tells of the last one.
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")


def recognises(names):
    """Whether a file with tensors of these names holds an EAGLE-3 head."""
    certain = any(
        name.startswith("midlayer.") or name in ("d2t", "t2d", "layers.0.hidden_norm.weight") for name in names
    )
    likely = sum(
        name in names for name in ("fc.weight", "norm.weight", "lm_head.weight", "layers.0.input_layernorm.weight")
    )
    return certain or likely >= 3


def native_format(head):
    return "speculators" if head.config.norm_before_residual else "eagle3"


def check_format(head, format):
    """ValueError if readers of `format` would compute something else, or a tensor that the format stores is missing."""
    if format == "eagle3" and head.config.norm_before_residual:
        raise ValueError(
            "readers of format 'eagle3' take norm_before_residual as false, and it is true for this head: use 'speculators'"
        )
    if format == "speculators" and head.needs_embedding:
        raise ValueError(
            "format 'speculators' stores the target's embedding, which this head lacks: call head.take_embedding first"
        )
    return format


def to_file(head, format, lm_head_weight=None):
    """`head` as a file in `format`: ({name: tensor}, config dict)."""
    state = dict(head.state_dict())
    if format == "eagle3" and head.embedding_is_targets:
        del state[EMBEDDING]  # readers share the target's
    elif EMBEDDING in state:
        state[EMBEDDING] = state[EMBEDDING].to(head.fc.weight.dtype)  # the target's embedding may have another dtype
    tensors = {_renamed(name, "midlayer.", LAYER[format]): tensor.cpu().contiguous() for name, tensor in state.items()}
    if format == "eagle3":
        return tensors, _plain_config(head.config)
    return tensors, _speculators_config(head.config, head.embedding_is_targets)


def _plain_config(config):
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_keys(config),
        **_shared_keys(config),
        **({} if config.aux_layer_ids is None else {"eagle_config": _nested_ids(config.aux_layer_ids)}),
    }
    if not config.own_embedding:
        # If this key is present, the original code leaves an embedding that is not in the file at random values instead of
        # taking the target's. Without the key every reader takes hidden_size.
        del keys["target_hidden_size"]
    return keys


def _speculators_config(config, embedding_is_targets):
    layer = layer_keys(config) | ({TARGETS_EMBEDDING: True} if embedding_is_targets else {})
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_speculative_tokens}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        **_shared_keys(config),
        **dict.fromkeys(UNSUPPORTED, False),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": layer.pop("base_model_name_or_path"), "architectures": []},
        },
        "transformers_version": layer.pop("transformers_version"),
        "transformer_layer_config": layer,
    }


def _shared_keys(config):
    ids = {} if config.aux_layer_ids is None else {LAYER_IDS: list(config.aux_layer_ids)}
    names = ("draft_vocab_size", "target_hidden_size", "norm_before_residual")
    return {name: getattr(config, name) for name in names} | ids


def _nested_ids(layer_ids):
    return {LAYER_IDS: [k - 1 for k in layer_ids], "use_aux_hidden_state": True}


def from_file(tensors, config):
    """Read a file's tensors: Reading of an Eagle3Config, its state without embed_tokens if the file has none.

    tensors: {name: tensor} as the file holds them; config: its config.json as a dict. Raises ValueError naming tensors that are
    missing, unexpected, misshapen, of a wrong dtype or with impossible ids, and config keys that are needed or do not fit.
    """
    tensors, notes = dict(tensors), []
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    speculators = "speculators_model_type" in config
    _check_variant(config)
    llama = _llama_keys(config) if speculators else config
    hidden_size, width = shape_of(tensors, "fc.weight")
    vocab_size, draft_vocab_size = vocab_size_of(tensors, llama, notes), shape_of(tensors, "lm_head.weight")[0]
    compare(notes, config, "draft_vocab_size", draft_vocab_size, "tensor lm_head.weight")
    if draft_vocab_size > vocab_size:
        raise ValueError(
            f"tensor lm_head.weight has {draft_vocab_size} rows, expected at most the vocabulary's {vocab_size}"
        )
    target_hidden_size = config.get("target_hidden_size") or hidden_size
    if type(target_hidden_size) is not int:
        raise ValueError(f'config.json says "target_hidden_size": {target_hidden_size!r}, expected a whole number')
    normed = config.get("norm_before_residual")
    _note_silence(config, prefix, speculators, notes)
    shape = Eagle3Config(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=_aux_layer_ids(config, width, target_hidden_size),
        norm_before_residual=speculators if normed is None else normed,
        **read_layer(tensors, prefix, llama, hidden_size, notes),
    )
    check_rope(shape)
    tables = read_draft_vocabulary(tensors.pop("d2t", None), tensors.pop("t2d", None), draft_vocab_size, vocab_size)
    expected = {_renamed(name, "midlayer.", prefix): size for name, size in shapes_of(Eagle3, shape).items()}
    for name in ("d2t", "t2d"):
        expected.pop(name, None)
    if EMBEDDING not in tensors and not shape.own_embedding:
        del expected[EMBEDDING]
    check_tensors(tensors, expected)
    state = {_renamed(name, prefix, "midlayer."): tensor for name, tensor in tensors.items()} | tables
    of_target = bool(llama.get(TARGETS_EMBEDDING)) and EMBEDDING in state
    return Reading(shape, state, "speculators" if speculators else "eagle3", notes, of_target)


def _check_variant(config):
    """ValueError for variants that compute something else; their keys stand in files of either format, some in eagle_config."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f'config.json says "eagle_config": {nested!r}, expected an object')
    for part, key in product((config, nested), UNSUPPORTED):
        if part.get(key):
            raise ValueError(f'config.json says "{key}": {part[key]!r}; only false is supported')


def _note_silence(config, prefix, speculators, notes):
    """Note the keys of EAGLE-3 that the config lacks, or has without effect."""
    if not config.get(LAYER_IDS) and not (config.get("eagle_config") or {}).get(LAYER_IDS):
        assume(notes, LAYER_IDS, "2, n//2, n-3", "what published heads read of a target of n layers")
    if speculators and config.get("norm_before_residual") is None:
        assume(notes, "norm_before_residual", True, "as readers of this format do")
    if config.get("tie_word_embeddings"):
        notes.append('config.json says "tie_word_embeddings": True; the tensors hold an lm_head of its own')
    format = "speculators" if speculators else "eagle3"
    if prefix != LAYER[format]:
        notes.append(f'its layer is called "{prefix}", in files of the format {format} it is "{LAYER[format]}"')


def _llama_keys(config):
    """The Llama's keys of a speculators config, joined with the keys that plain files hold beside them."""
    if config["speculators_model_type"] != "eagle3":
        raise ValueError(
            f'config.json says "speculators_model_type": {config["speculators_model_type"]!r}, expected "eagle3"'
        )
    try:
        says = config["speculators_config"]
        drafted = {"num_speculative_tokens": says["proposal_methods"][0]["speculative_tokens"]}
        return (
            config["transformer_layer_config"] | drafted | {"base_model_name_or_path": says["verifier"]["name_or_path"]}
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            "config.json is not a speculators config: expected transformer_layer_config, and speculators_config with "
            f"proposal_methods and verifier ({type(error).__name__}: {error})"
        ) from None


def _aux_layer_ids(config, width, target_hidden_size):
    """The aux layers that a file names, low to high, or None; ValueError if it contradicts itself or its fc."""
    outside, inside = config.get(LAYER_IDS) or None, (config.get("eagle_config") or {}).get(LAYER_IDS) or None
    found = []
    for ids, less in ((outside, 0), (inside, 1)):
        if ids is None:
            continue
        if not (isinstance(ids, list) and all(type(id) is int for id in ids)):
            raise ValueError(f'config.json says "{LAYER_IDS}": {ids!r}, expected a list of layer numbers')
        found.append(sorted(id + less for id in ids))
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(
            f'config.json says "{LAYER_IDS}": {outside}, and {inside} in eagle_config, where numbers are one less: expected '
            f"{[id - 1 for id in outside]} there"
        )
    count = len(found[0]) if found else 3
    if width != count * target_hidden_size:
        named = f"its {count} aux layers" if found else "the 3 aux layers of a file that names none"
        raise ValueError(
            f"tensor fc.weight has {width} columns, expected {count * target_hidden_size}: {named}, each target_hidden_size "
            f"{target_hidden_size} wide"
        )
    return tuple(found[0]) if found else None


def _renamed(name, old, new):
    return new + name.removeprefix(old) if name.startswith(old) else name
