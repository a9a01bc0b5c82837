"""What each reader asks of a head's files, and what it silently does otherwise. From the readers' source code, 2026-11.

A rule takes HeadFiles and yields problems, pairs of a kind and a sentence that begins with the reader as "it":

    LAYOUT  it expects the files of another format
    NO      it cannot load them, or serves without drafting
    WRONG   it loads them, and computes something else than the head does
    NOTE    it loads them; what to know of it

hub_export/readers/readers.py says which rule is whose. This file reads no disk.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ...heads.eagle3 import default_aux_layers
from ...heads.formats.eagle3 import LAYER_IDS
from ...heads.formats.layer import DEFAULT_THETA

LAYOUT, NO, WRONG, NOTE = "layout", "no", "wrong", "note"


@dataclass(frozen=True)
class HeadFiles:
    """What a reader sees of a head (`config`, `tensors`, `files`, `path`), and the head that they say."""

    head: nn.Module
    format: str  # the layout, one of FORMATS
    config: dict  # config.json
    tensors: frozenset  # names in the weight files, without `prefix`
    files: frozenset  # names in the folder
    path: str | None = None  # as it would be given to a reader; None: not known yet
    num_layers: int | None = None  # of the target; None: not known
    prefix: str = ""  # what the names of all tensors begin with, as no reader expects it


def original_medusa(files):
    head = files.head
    if "medusa_lm_head.pt" not in files.files:
        yield NO, "it opens `medusa_lm_head.pt` and nothing else, which is not here"
    # Its legacy class, which reads heads without lm_heads, builds as many as there are.
    if head.config.num_heads != 5 and not head.config.shared_lm_head:
        yield WRONG, f"it builds 5 heads whatever the config says: these are {head.config.num_heads}"
    if not all(_same_weights(one.blocks) for one in head.heads):
        yield (
            WRONG,
            f"it repeats one residual block {head.config.num_layers} times per head, these have blocks of their own",
        )


def _same_weights(modules):
    first, *others = (module.state_dict() for module in modules)
    return all(torch.equal(one[name], first[name]) for one in others for name in first)


def tgi_medusa(files):
    config, head = files.config, files.head.config
    if "medusa_lm_head.safetensors" not in files.files:
        yield NO, "it opens `medusa_lm_head.safetensors` and nothing else, which is not here"
    yield from _names_target(config)
    if "architectures" in config:
        yield NO, "config.json has `architectures`: with it, it serves without speculation and says nothing"
    said, layers = config.get("medusa_num_heads"), config.get("medusa_num_layers")
    if said is None:
        yield NO, "config.json lacks `medusa_num_heads`, by which it knows Medusa heads"
    elif type(said) is not int:
        yield NO, f"config.json's `medusa_num_heads` is {said!r}, which is no number of heads"
    elif said != head.num_heads:
        kind, verb = (WRONG, "drafts") if said < head.num_heads else (NO, "looks for")
        yield kind, f"it {verb} the {said} heads that config.json says, {head.num_heads} are here"
    if layers != head.num_layers:
        yield NO, f"it builds as many blocks per head as config.json says ({layers}), these have {head.num_layers}"
    if head.shared_lm_head and head.num_layers > 1:
        yield NO, f"it takes one residual block per head, these have {head.num_layers}"


def vllm_medusa(files):
    config, head = dict(files.config), files.head.config
    if config.get("model_type") != "medusa" or config.get("architectures") != ["MedusaModel"]:
        yield NO, 'config.json must say "model_type": "medusa" and "architectures": ["MedusaModel"]'
    # Its reader takes any key with both words in it.
    heads = [value for key, value in config.items() if "num" in key and "heads" in key] or [5]
    layers = [value for key, value in config.items() if "num" in key and "layers" in key] or [1]
    for what, said, found in (("heads", heads[-1], head.num_heads), ("blocks per head", layers[-1], head.num_layers)):
        if said != found:
            yield WRONG, f"it builds as many {what} as config.json says ({said}), {found} are here"
    for key, default, found in (("hidden_size", 4096, head.hidden_size), ("vocab_size", 32001, head.vocab_size)):
        if config.get(key, default) != found:
            yield NO, f"it builds {key} {config.get(key, default)} by config.json, the tensors have {found}"
    if config.get("truncated_vocab_size") not in (None, head.vocab_size):
        yield NO, f"config.json's truncated_vocab_size {config['truncated_vocab_size']} needs a `token_map`"
    if not config.get("medusa_fc_bias") and any(name.endswith(".bias") for name in files.tensors):
        yield WRONG, "it drops every bias, as config.json does not say `medusa_fc_bias` true"
    if bool(config.get("original_lm_head")) != head.shared_lm_head:
        yield WRONG, f"config.json's original_lm_head should be {str(head.shared_lm_head).lower()}"


def tgi_mlp_speculator(files):
    config, head = files.config, files.head.config
    if not any(name.endswith(".safetensors") for name in files.files):
        yield NO, "it reads .safetensors files, and there are none"
    yield from _names_target(config)
    if config.get("model_type") != "mlp_speculator":
        yield NO, 'config.json must say "model_type": "mlp_speculator"'
    if config.get("architectures") != ["MLPSpeculatorPreTrainedModel"]:
        yield NO, 'without "architectures": ["MLPSpeculatorPreTrainedModel"] it serves without speculation'
    if "inner_dim" not in config:
        yield NO, "config.json lacks `inner_dim`"
    elif config["inner_dim"] != head.inner_size:
        yield (
            WRONG,
            f"it weighs tokens by `inner_dim` {config['inner_dim']} as it stands, the inner size is {head.inner_size}",
        )
    yield from _steps_said(config, head)
    if head.scale_input:
        yield WRONG, "it takes no notice of `scale_input`, which is true here"


def mlp_speculator(files):
    """vLLM and fms-extras."""
    config, head = files.config, files.head.config
    for key, default, found in (("vocab_size", 32000, head.vocab_size), ("emb_dim", 4096, head.hidden_size)):
        if config.get(key, default) != found:
            yield NO, f"it builds {key} {config.get(key, default)} by config.json, the tensors have {found}"
    if (config.get("inner_dim") or config.get("emb_dim", 4096)) != head.inner_size:
        yield NO, f"it builds inner_dim {config.get('inner_dim', 0)} by config.json, the tensors have {head.inner_size}"
    yield from _steps_said(config, head)


def _steps_said(config, head):
    said = config.get("n_predict", 3)
    if type(said) is not int:
        yield NO, f"config.json's `n_predict` is {said!r}, which is no number of steps"
    elif said != head.num_steps:
        yield (
            WRONG if said < head.num_steps else NO,
            f"it drafts {said} steps by config.json, {head.num_steps} are here",
        )
    if head.tie_weights and head.num_steps == 1:
        yield NO, "it wants two projections of tied steps, one step has one"


def vllm_eagle(files):
    config, tensors = files.config, files.tensors
    if config.get("architectures") != ["LlamaForCausalLM"]:
        yield LAYOUT, f'it wants "architectures": ["LlamaForCausalLM"], config.json says {config.get("architectures")}'
    if files.head.config.fc_bias:
        yield NO, "its `fc` has no bias, this head's has one"
    elif "fc.bias" in tensors:
        yield LAYOUT, "its `fc` has no bias, and refuses `fc.bias` even if it is zero"
    if "lm_head.weight" in tensors:
        yield LAYOUT, "it refuses the `lm_head.weight`, a copy of the target's"
    if not files.head.config.attention_bias and (config.get("attention_bias") or config.get("bias")):
        yield WRONG, 'it takes "bias": true for a bias of the attention too, which is not in the file'
    if files.head.config.attention_bias and not any(config.get(key) for key in ("qkv_bias", "attention_bias", "bias")):
        yield NO, "it refuses the biases of q, k and v unless config.json says `qkv_bias` true"
    yield from _llama_said(config, files.head.config)
    yield from _rope_said(files, config)
    if files.path is not None and "eagle-" not in files.path.lower():
        yield NOTE, 'needs "method": "eagle": it guesses it only from "eagle-" in the path'


def sglang_eagle(files):
    config = files.config
    if config.get("architectures") != ["LlamaForCausalLMEagle"]:
        said = config.get("architectures")
        yield LAYOUT, f'it wants "architectures": ["LlamaForCausalLMEagle"], config.json says {said}'
    if "fc.bias" not in files.tensors:
        yield LAYOUT, "its `fc` has a bias, which stays at random values where `fc.bias` is missing"
    if files.head.config.attention_bias:
        yield WRONG, "it has no biases of q, k and v, and passes over those in the file"
    yield from _llama_said(config, files.head.config)
    yield from _rope_said(files, config)


def original_eagle(files):
    """As of its version for EAGLE-3, which takes the target's embedding; before, it opened `pytorch_model.bin` and nothing else."""
    bias, head = files.config.get("bias", True), files.head.config
    if bias and "fc.bias" not in files.tensors:
        yield (
            LAYOUT,
            "its `fc` has a bias unless config.json says `bias` false, which stays at random values where it is missing",
        )
    if not bias and head.fc_bias:
        yield WRONG, "it passes over `fc.bias`, as config.json says `bias` false"
    if head.rope_scaling is not None or head.num_attention_heads * head.head_dim != head.hidden_size:
        yield NO, "it knows no rope scaling, and no heads that are not the hidden size"


def vllm_eagle3(files):
    config = files.config
    known = (["LlamaForCausalLMEagle3"], ["Eagle3LlamaForCausalLM"], ["LlamaForCausalLM"])
    if config.get("architectures") not in known:
        yield NO, f'it wants "architectures": {known[0]}, config.json says {config.get("architectures")}'
    yield from _plain_eagle3(files)
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


def sglang_eagle3(files):
    config, head = files.config, files.head.config
    yield from _midlayer(
        files, "it calls the layer `midlayer.` and passes over `layers.0.`: it would draft from random values"
    )
    if files.format == "speculators":
        return
    if config.get("architectures") != ["LlamaForCausalLMEagle3"]:
        said = config.get("architectures")
        yield LAYOUT, f'it wants "architectures": ["LlamaForCausalLMEagle3"], config.json says {said}'
    yield from _plain_eagle3(files)
    if config.get("tie_word_embeddings"):
        yield WRONG, "it puts the embedding in the place of lm_head: config.json says `tie_word_embeddings` true"
    if head.attention_bias:
        yield NO, "it has no biases of q, k and v, and passes over those in the file"
    if (config.get("eagle_config") or {}).get(LAYER_IDS) is None and not _are_default(files):
        yield (
            WRONG,
            "the layers' ids are not in eagle_config, where it reads them (each one less): it takes its default",
        )


def _midlayer(files, otherwise):
    """The original layout: the name of its layer, and its one place of the norm."""
    if files.format != "speculators" and not any(name.startswith("midlayer.") for name in files.tensors):
        yield LAYOUT, otherwise
    if files.head.config.norm_before_residual:
        yield NO, "it knows no `norm_before_residual`, which is true here"


def original_eagle3(files):
    config, head = files.config, files.head.config
    yield from _midlayer(files, "it calls the layer `midlayer.`, not `layers.0.`")
    if head.rope_scaling is not None:
        yield NO, "it knows no rope scaling"
    if head.attention_bias:
        yield WRONG, "it has no biases of q, k and v, and passes over those in the file"
    yield from _three_layers(files)
    if "target_hidden_size" in config and "embed_tokens.weight" not in files.tensors:
        yield (
            WRONG,
            "it takes the target's embedding only where config.json has no `target_hidden_size`: it stays at random values",
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
        yield WRONG, "it has no biases of q, k and v, and passes over those in the file"
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
    if files.format == "speculators" and not verifier.get("name_or_path"):
        yield NO, "it loads the target that config.json names as `verifier`, and none is named"


def _names_target(config):
    if not config.get("base_model_name_or_path"):
        yield NO, "config.json names no target (`base_model_name_or_path`), which it loads by it"


def _llama_said(config, head):
    """Where it would build a layer of other sizes than the tensors have, or more layers than one."""
    heads, hidden_size = config.get("num_attention_heads") or 32, config.get("hidden_size") or 4096
    guessed = {"num_key_value_heads": heads}
    if type(heads) is int and type(hidden_size) is int:
        guessed["head_dim"] = hidden_size // heads
    names = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    found = {name: getattr(head, name) for name in names} | {"num_hidden_layers": 1}
    for name, value in found.items():
        said = config.get(name) or guessed.get(name)
        if said != value:
            says = "nothing" if said is None else said
            yield NO, f"it builds the layer by config.json, which says {says} of {name}; the tensors say {value}"


def _plain_eagle3(files):
    """What vLLM and SGLang ask alike of the plain layout."""
    config, head = files.config, files.head.config
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        yield NO, "`target_hidden_size` is null in config.json, and it computes with it"
    if config.get("draft_vocab_size") is None and head.draft_vocab_size != head.vocab_size:
        yield NO, f"config.json lacks `draft_vocab_size`: it expects an lm_head of {head.vocab_size} rows"
    yield from _three_layers(files)
    yield from _llama_said(config, files.head.config)
    yield from _rope_said(files, config)


def _three_layers(files):
    count = files.head.config.num_aux_layers
    if count != 3:
        yield NO, f"it builds `fc` for three of the target's layers, this head reads {count}"


def _rope_said(files, config):
    """Where rope is said once only, in the new spelling, or not at all."""
    head = files.head.config
    plain = head.rope_theta == DEFAULT_THETA and head.rope_scaling is None
    if "rope_theta" not in config and "rope_parameters" in config and not plain:
        yield WRONG, "on transformers 4 it sees `rope_theta` and `rope_scaling` only: it takes 10000 without scaling"
    elif "rope_theta" not in config and "rope_parameters" not in config:
        yield NOTE, "config.json says no `rope_theta`: it takes its default, mostly 10000"


def _are_default(files):
    """Whether the head reads the default layers of its target, whose depth is taken from them where it is not known."""
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
