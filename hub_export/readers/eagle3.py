"""Requirements of each reader on the files of EAGLE-3 heads, and what it does silently if they are not met."""

from ...heads.eagle3 import default_aux_layers
from ...heads.formats.eagle3 import LAYER_IDS
from .readers import (
    ALIKE,
    LAYOUT,
    NO,
    NO_BIASES,
    SGLANG,
    TGI,
    VLLM,
    WRONG,
    Asks,
    Reader,
    asked,
    layer_said,
    layer_tables,
    rope_said,
)

FORMATS_ARE, FROM_LM_HEAD = ALIKE, True


def vllm(files):
    config = files.config
    known = (["LlamaForCausalLMEagle3"], ["Eagle3LlamaForCausalLM"], ["LlamaForCausalLM"])
    if config.get("architectures") not in known:
        yield NO, f'it wants "architectures": {known[0]}, config.json says {config.get("architectures")}'
    yield from _plain(files)
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        yield NO, "`use_aux_hidden_state` false in eagle_config: it builds no `fc`"
    yield from _vllm_biases(files, config)
    if config.get(LAYER_IDS) is None and (inside := (config.get("eagle_config") or {}).get(LAYER_IDS)) is not None:
        yield (
            WRONG,
            (
                f"the layers' ids are not at the top level of config.json: it takes its default, or {inside} of eagle_config, "
                "where they count one less"
            ),
        )


def vllm_speculators(files):
    if files.config.get(LAYER_IDS) is None and not _are_default(files):
        yield WRONG, "the layers' ids are not at the top level, where it reads them: it takes its default"
    yield from _three_layers(files)
    yield from _vllm_biases(files, files.config.get("transformer_layer_config") or {})


SGLANG_ASKS = (
    Asks(
        "architectures",
        'it wants "architectures": ["LlamaForCausalLMEagle3"], config.json says {said}',
        LAYOUT,
        ["LlamaForCausalLMEagle3"],
    ),
)


def sglang(files):
    config = files.config
    yield from _midlayer(
        files, "it calls the layer `midlayer.` and passes over `layers.0.`: it would draft from random values"
    )
    if files.format == "speculators":
        return
    yield from asked(files, SGLANG_ASKS)
    yield from _plain(files)
    if config.get("tie_word_embeddings"):
        yield WRONG, "it puts the embedding in the place of lm_head: config.json says `tie_word_embeddings` true"
    if files.head.config.attention_bias:
        yield NO, NO_BIASES
    if (config.get("eagle_config") or {}).get(LAYER_IDS) is None and not _are_default(files):
        yield (
            WRONG,
            "the layers' ids are not in eagle_config, where it reads them (each one less): it takes its default",
        )


def original(files):
    config, head = files.config, files.head.config
    yield from _midlayer(files, "it calls the layer `midlayer.`, not `layers.0.`")
    if head.rope_scaling is not None:
        yield NO, "it knows no rope scaling"
    if head.attention_bias:
        yield WRONG, NO_BIASES
    yield from _three_layers(files)
    if "target_hidden_size" in config and "embed_tokens.weight" not in files.tensors:
        yield (
            WRONG,
            "it takes the target's embedding only if config.json has no `target_hidden_size`: the embedding stays at random values",
        )
    if "draft_vocab_size" not in config and files.format != "speculators":
        yield NO, "config.json lacks `draft_vocab_size`"
    if not _are_default(files):
        yield WRONG, "it reads the default layers 2, n//2, n-3 of the target whatever the config says"


def speculators_library(files):
    head = files.head.config
    if head.target_hidden_size != head.hidden_size:
        yield (
            NO,
            f"its heads are as wide as the target ({head.target_hidden_size}), this one is {head.hidden_size} wide",
        )
    if head.attention_bias:
        yield WRONG, NO_BIASES
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
    if files.format == "speculators" and not verifier.get("name_or_path"):
        yield NO, "it loads the target that config.json names as `verifier`, and none is named"


def _midlayer(files, otherwise):
    """Problems for readers of the original layout: they want tensors named midlayer.*, and do not know `norm_before_residual`."""
    if files.format != "speculators" and not any(name.startswith("midlayer.") for name in files.tensors):
        yield LAYOUT, otherwise
    if files.head.config.norm_before_residual:
        yield NO, "it knows no `norm_before_residual`, which is true here"


def _plain(files):
    """Problems that vLLM and SGLang both have with the plain layout."""
    config, head = files.config, files.head.config
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        yield NO, "`target_hidden_size` is null in config.json, and it computes with that value"
    if config.get("draft_vocab_size") is None and head.draft_vocab_size != head.vocab_size:
        yield NO, f"config.json lacks `draft_vocab_size`: it expects an lm_head of {head.vocab_size} rows"
    yield from _three_layers(files)
    yield from layer_said(files)
    yield from rope_said(files)


def _three_layers(files):
    count = files.head.config.num_aux_layers
    if count != 3:
        yield NO, f"it builds `fc` for three of the target's layers, this head reads {count}"


def _are_default(files):
    """Whether the head reads the default layers of its target. An unknown depth of the target is inferred from the layers."""
    ids = files.head.config.aux_layer_ids
    if ids is None:
        return True
    depth = files.num_layers or ids[-1] + 3
    return depth >= 7 and ids == default_aux_layers(depth)


def _vllm_biases(files, config):
    if files.head.config.attention_bias and config.get("attention_bias"):
        yield WRONG, "it takes `attention_bias` for o_proj's too, which is not in the file and stays at random values"
    elif files.head.config.attention_bias:
        yield NO, "it builds no biases of q, k and v, and refuses those in the file"


READERS = (
    Reader(VLLM, {"eagle3": "yes", "speculators": "yes"}, vllm, {"speculators": vllm_speculators}, starts="vLLM"),
    Reader(SGLANG, {"eagle3": "yes"}, sglang, starts="EAGLE3"),
    Reader("the original EAGLE code", {"eagle3": "yes"}, original),
    Reader("the `speculators` library", {"speculators": "yes"}, speculators_library),
    Reader(TGI, without="no EAGLE support"),
)


def in_card(head):
    ids = head.config.aux_layer_ids
    layers = "the default ones of the target" if ids is None else ", ".join(map(str, ids))
    rows = [("reads what enters the target's layers", layers), ("draft vocabulary", head.config.draft_vocab_size)]
    return "An EAGLE-3 head", "drafts", rows


def title(config):
    return "EAGLE-3 head"


def features(head, depth):
    """The ids of layers in each reader's counting, None if they depend on an unknown depth of the target."""
    ids = head.config.aux_layer_ids
    if ids is None and depth is not None and depth >= 7:
        ids = default_aux_layers(depth)
    return {
        "kind": "streams",
        "named_by_file": head.config.aux_layer_ids is not None,
        "entering_layers": None if ids is None else list(ids),
        f"sglang_{LAYER_IDS}": None if ids is None else [id - 1 for id in ids],
    }


tables = layer_tables
