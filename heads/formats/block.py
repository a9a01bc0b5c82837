"""On-disk formats of block drafters.

    dflash        z-lab's layout, which SGLang and vLLM read too: a Qwen3's keys, block_size, and dflash_config with the rest
    speculators   Red Hat's speculators and vLLM: the Qwen3's keys lie in transformer_layer_config, and the target's embedding and
                  lm_head come along

Tensors have the names of heads/block.py, and all of the parts that a file has must be there. Both formats hold DSpark's parts or
DFlash2's, with or without embed_tokens (without, it is the target's: BlockHead.take_embedding), lm_head, d2t and t2d. Also read is
DeepSpec's layout, "deepspec": flat keys, and copies of the target's embedding and lm_head. The keys: block_config.py.

Refused, by the tensor or key that tells: DSpark's other edges, Domino's correction.

This file touches no disk.
"""

from ..block import BlockHead
from ..block_config import BlockConfig
from ..draft_vocabulary import read_draft_vocabulary
from ..storage.reading import Reading, compare
from ..storage.tensor_checks import check_tensors, shape_of
from .block_config import (
    TARGETS_EMBEDDING,
    TARGETS_LM_HEAD,
    Keys,
    plain_config,
    read_keys,
    scales_of,
    speculators_config,
    whole_number,
)
from .layer import check_rope, read_layer, shapes_of, vocab_size_of

FORMATS = ("dflash", "speculators")
CONFIG_NAMES = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel")
CONFIG_NAMES += ("DFlashSpeculator", "DSparkSpeculator")
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
# Parts of tensors' names that tell of another member of the family.
OTHERS = {
    "markov_head.gate_proj.": "DSpark's gated edge",
    "markov_head.joint_proj.": "DSpark's recurrent edge",
    "prefix_gru.": "Domino's correction",
}
# Of the target, in files that the speculators library wrote while training: no reader drafts with them.
VERIFIERS = ("verifier_lm_head.weight", "verifier_norm.weight")


def recognises(names):
    """Whether a file with tensors of these names holds a block drafter. EAGLE-3's have much the same names: try this first."""
    return "hidden_norm.weight" in names or any(
        name.startswith(("markov_head.", "candidate_selector.")) for name in names
    )


def native_format(head):
    return "dflash"


def check_format(head, format):
    """ValueError if readers of `format` would compute something else, or a tensor that the format stores is missing."""
    if format == "speculators" and head.config.is_causal:
        raise ValueError(
            "readers of format 'speculators' let a slot see its whole block, and this head's see only the slots before them "
            "(is_causal): use 'dflash'"
        )
    config = head.config
    if format == "speculators" and (held := scales_of(config)):
        raise ValueError(
            f"readers of format 'speculators' scale and cap nothing, and this head has {' and '.join(held)}: use 'dflash'"
        )
    if format == "speculators" and config.sliding_layers and not config.window_of_block:
        raise ValueError(
            "readers of format 'speculators' count the window of a sliding layer from the block, and this head's counts from the "
            "slot (no window_of_block): use 'dflash'"
        )
    if format == "speculators" and bool(config.selector_rank) != bool(config.conv_kernel_size):
        held = "a selector" if config.selector_rank else "convolutions"
        raise ValueError(
            f"readers of format 'speculators' build both of DFlash2's parts, and this head has {held} alone: use 'dflash'"
        )
    if format == "speculators" and config.selector_rank and config.sample_from_anchor:
        raise ValueError(
            "readers of format 'speculators' refuse a selector where every slot predicts the next token (sample_from_anchor): use "
            "'dflash'"
        )
    if format == "speculators" and head.needs_embedding:
        raise ValueError(
            "format 'speculators' stores the target's embedding, which this head lacks: call head.take_embedding first"
        )
    return format


def to_file(head, format="dflash", lm_head_weight=None):
    """`head` as a file in `format`: ({name: tensor}, config dict).

    lm_head_weight: the target's lm_head [V, H], which "speculators" stores with heads that use it.
    """
    state, dtype = dict(head.state_dict()), head.fc.weight.dtype
    if format == "speculators" and head.uses_target_lm_head:
        if lm_head_weight is None:
            raise ValueError(
                "format 'speculators' stores the target's lm_head, which this head uses: give lm_head_weight"
            )
        state[LM_HEAD] = lm_head_weight.detach()
    if format == "dflash" and head.embedding_is_targets:
        state.pop(EMBEDDING, None)  # readers share the target's
    for name in (EMBEDDING, LM_HEAD):  # the target's may have another dtype
        if name in state:
            state[name] = state[name].to(dtype)
    if format == "dflash":
        keys = plain_config(head.config)
    else:
        keys = speculators_config(head.config, head.embedding_is_targets)
    return {name: tensor.cpu().contiguous() for name, tensor in state.items()}, keys


def from_file(tensors, config):
    """Read a file's tensors: Reading of a BlockConfig, its state without embed_tokens and lm_head if the file has none.

    tensors: {name: tensor} as the file holds them; config: its config.json as a dict. Raises ValueError naming tensors that are
    missing, unexpected, misshapen or not floating point, and config keys that are missing, do not fit or ask for other formulas.
    """
    tensors, notes = dict(tensors), []
    _check_parts(tensors)
    keys = read_keys(tensors, config, notes)
    if keys.format == "speculators":
        for name in VERIFIERS:
            if tensors.pop(name, None) is not None:
                notes.append(f"tensor {name} is the target's, and no draft reads it: left out")
    if keys.layer.get(TARGETS_LM_HEAD):
        tensors.pop(LM_HEAD, None)
    hidden_size, width = shape_of(tensors, "fc.weight")
    ids = keys.aux_layer_ids
    if width != len(ids) * hidden_size:
        raise ValueError(
            f"tensor fc.weight has {width} columns, expected {len(ids) * hidden_size}: {keys.ids_key} names {len(ids)} layers, "
            f"each {hidden_size} wide"
        )
    num_layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    layer = read_layer(tensors, "layers.0.", keys.layer, hidden_size, notes, num_layers)
    count = keys.block_size - (not keys.sample_from_anchor)
    compare(notes, keys.layer, "num_speculative_tokens", count, "block_size")
    vocab_size = vocab_size_of(tensors, keys.layer, notes)
    draft_vocab_size = _draft_vocab_size(tensors, vocab_size)
    if draft_vocab_size is not None:
        compare(notes, keys.said, "draft_vocab_size", draft_vocab_size, f"tensor {LM_HEAD}")
    shape = BlockConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_hidden_layers=num_layers,
        mask_token_id=keys.mask_token_id,
        aux_layer_ids=ids,
        num_target_layers=keys.num_target_layers,
        sample_from_anchor=keys.sample_from_anchor,
        draft_vocab_size=draft_vocab_size,
        **keys.places,
        **keys.scales,
        **_dspark_parts(tensors, keys, hidden_size, notes),
        **_dflash2_parts(tensors, keys, hidden_size, notes),
        **layer | {"num_speculative_tokens": count, "attention_bias": False},
    )
    check_rope(shape)
    found = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tables = read_draft_vocabulary(*found, shape.num_scores, vocab_size)
    expected = shapes_of(BlockHead, shape)
    for name in ("d2t", "t2d"):
        expected.pop(name, None)
    if EMBEDDING not in tensors:
        del expected[EMBEDDING]
    check_tensors(tensors, expected)
    of_target = bool(keys.layer.get(TARGETS_EMBEDDING)) and EMBEDDING in tensors
    return Reading(shape, tensors | tables, keys.format, notes, of_target)


def _check_parts(tensors):
    """ValueError for other members of the family, naming the tensor."""
    for name in tensors:
        for part, what in OTHERS.items():
            if name.startswith(part) or f".{part}" in name:
                raise ValueError(
                    f"tensor {name} belongs to {what}, which is not read yet: expected DFlash, DFlash2, or DSpark with its plain "
                    "edge"
                )


def _draft_vocab_size(tensors, vocab_size):
    """The rows of the file's lm_head; None where it has none."""
    if LM_HEAD not in tensors:
        return None
    rows = shape_of(tensors, LM_HEAD)[0]
    if rows > vocab_size:
        raise ValueError(f"tensor {LM_HEAD} has {rows} rows, expected at most the vocabulary's {vocab_size}")
    return rows


def _dspark_parts(tensors, keys: Keys, hidden_size, notes):
    """The fields of BlockConfig that tell of DSpark's parts, by the tensors."""
    name, proj = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
    rank = shape_of(tensors, name)[1] if any(one.startswith("markov_head.") for one in tensors) else 0
    compare(notes, keys.said, "markov_rank", rank)
    found = {"edge_rank": rank, "confidence": any(one.startswith("confidence_head.") for one in tensors)}
    compare(notes, keys.said, "enable_confidence_head", found["confidence"])
    if found["confidence"]:
        sees = shape_of(tensors, proj)[1] != hidden_size
        found["confidence_sees_token"] = sees
        compare(notes, keys.said, "confidence_head_with_markov", sees)
    return found


def _dflash2_parts(tensors, keys: Keys, hidden_size, notes):
    """The fields of BlockConfig that tell of DFlash2's parts, by the tensors; the number of candidates is config.json's."""
    found, said, rank, taps = {}, keys.said, 0, 0
    if any(one.startswith("candidate_selector.") for one in tensors):
        rank = shape_of(tensors, "candidate_selector.hidden_projection.weight")[0]
        found["selector_top_k"] = whole_number(said, "selector_top_k", least=2)
    compare(notes, said, "selector_rank", rank)
    base, projection = (f"layers.0.attention_conv.{one}" for one in ("base_kernel", "kernel_projection.weight"))
    if any("attention_conv." in one or "mlp_conv." in one for one in tensors):
        taps, rows = shape_of(tensors, base, 3)[1], shape_of(tensors, projection)[0]
        groups = rows // max(2 * taps, 1)
        if not groups or rows != 2 * taps * groups or hidden_size % groups:
            raise ValueError(
                f"tensor {projection} has {rows} rows, expected 2 x {taps} taps for each of some groups of the {hidden_size} "
                "channels"
            )
        found["conv_group_size"] = hidden_size // groups
        compare(notes, said, "conv_group_size", found["conv_group_size"])
    compare(notes, said, "conv_kernel_size", taps)
    return found | {"selector_rank": rank, "conv_kernel_size": taps}
