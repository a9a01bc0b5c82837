"""Requirements of each reader on the files of EAGLE heads, and what it does silently if they are not met."""

from .readers import (
    DIALECTS,
    LAYOUT,
    NO,
    NO_BIASES,
    NOTE,
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

FORMATS_ARE, FROM_LM_HEAD = DIALECTS, False

WANTS = 'it wants "architectures": ["{0}"], config.json says {{said}}'
VLLM_ASKS = (Asks("architectures", WANTS.format("LlamaForCausalLM"), LAYOUT, ["LlamaForCausalLM"]),)
SGLANG_ASKS = (Asks("architectures", WANTS.format("LlamaForCausalLMEagle"), LAYOUT, ["LlamaForCausalLMEagle"]),)


def vllm(files):
    config, tensors, head = files.config, files.tensors, files.head.config
    yield from asked(files, VLLM_ASKS)
    if head.fc_bias:
        yield NO, "its `fc` has no bias, this head's has one"
    elif "fc.bias" in tensors:
        yield LAYOUT, "its `fc` has no bias, and refuses `fc.bias` even if it is zero"
    if "lm_head.weight" in tensors:
        yield LAYOUT, "it refuses the `lm_head.weight`, a copy of the target's"
    if not head.attention_bias and (config.get("attention_bias") or config.get("bias")):
        yield WRONG, 'it takes "bias": true for a bias of the attention too, which is not in the file'
    if head.attention_bias and not any(config.get(key) for key in ("qkv_bias", "attention_bias", "bias")):
        yield NO, "it refuses the biases of q, k and v unless config.json says `qkv_bias` true"
    yield from layer_said(files)
    yield from rope_said(files)
    if files.path is not None and "eagle-" not in files.path.lower():
        yield NOTE, 'needs "method": "eagle": it guesses it only from "eagle-" in the path'


def sglang(files):
    yield from asked(files, SGLANG_ASKS)
    if "fc.bias" not in files.tensors:
        yield LAYOUT, "its `fc` has a bias, which stays at random values where `fc.bias` is missing"
    if files.head.config.attention_bias:
        yield WRONG, NO_BIASES
    yield from layer_said(files)
    yield from rope_said(files)


def original(files):
    """The original code's release for EAGLE-3, which takes the target's embedding. Earlier ones opened only `pytorch_model.bin`."""
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


READERS = (
    Reader(VLLM, {"eagle-vllm": "yes"}, vllm, starts="vLLM"),
    Reader(SGLANG, {"eagle-sglang": "yes"}, sglang, starts="EAGLE"),
    Reader("the original EAGLE code", {"eagle-vllm": "yes"}, original),
    Reader(TGI, without="no EAGLE support"),
)


def in_card(head):
    return "An EAGLE head", "drafts", [("logits", "the target's lm_head")]


def title(config):
    return "EAGLE head"


def features(head, depth):
    return {"kind": "final"}


tables = layer_tables
