"""Who reads which format, and how: the lines of a model card that depend on the format. From the readers' source code, 2026-11."""

from ..heads.formats import native_format

# Headings of the card's table, in its order; the families' own projects follow.
VLLM, TGI, SGLANG = "vLLM", "text-generation-inference", "SGLang"
NOT_HERE = "not this layout: export with `--format {other}`"

# format -> (reader, what it takes)
READERS = {
    "medusa": (
        ("the original Medusa code (FasterDecoding)", "yes, through `medusa_lm_head.pt`{five}"),
        (TGI, "yes, through `medusa_lm_head.safetensors`"),
        (VLLM, "not this layout: export with `--format vllm` for vLLM 0.20 to 0.32"),
        (SGLANG, "no Medusa support"),
    ),
    "medusa-shared": (
        ("the original Medusa code (FasterDecoding)", "by its legacy class, through `medusa_lm_head.pt`"),
        (TGI, "{tgi_shared}"),
        (VLLM, "not this layout: export with `--format vllm` for vLLM 0.20 to 0.32"),
        (SGLANG, "no Medusa support"),
    ),
    "vllm": (
        (VLLM, "0.20 to 0.32 (0.33 removed Medusa)"),
        ("the original Medusa code (FasterDecoding)", NOT_HERE),
        (TGI, NOT_HERE),
        (SGLANG, "no Medusa support"),
    ),
    "mlp-speculator": (
        (TGI, "{tgi_scaled}"),
        (VLLM, "to 0.9"),
        ("fms-extras", "yes"),
        (SGLANG, "no support of MLP speculators"),
    ),
    "eagle-vllm": (
        (VLLM, "yes"),
        ("the original EAGLE code", "{original_eagle}"),
        (SGLANG, "not this dialect: export with `--format eagle-sglang`"),
        (TGI, "no EAGLE support"),
    ),
    "eagle-sglang": (
        (SGLANG, "yes"),
        (VLLM, "{vllm_eagle}"),
        (TGI, "no EAGLE support"),
    ),
    "eagle3": (
        (VLLM, "yes"),
        (SGLANG, "yes"),
        ("the original EAGLE code", "{original_eagle3}"),
        (TGI, "no EAGLE support"),
    ),
    "speculators": (
        (VLLM, "yes, and the `speculators` library"),
        (SGLANG, "{sglang_eagle3}"),
        (TGI, "no EAGLE support"),
    ),
}

# format -> the method to name to vLLM, and the versions that read it.
VLLM_METHODS = {
    "vllm": ("medusa", "vLLM 0.20 to 0.32 (which drafts chains, with sampling rules of its own)"),
    "eagle-vllm": ("eagle", "vLLM"),
    "eagle3": ("eagle3", "vLLM"),
    "speculators": ("eagle3", "vLLM"),
}


def readers_table(head, format):
    """Rows of (reader, what it takes) for this head in this format."""
    says = {"other": native_format(head)} | _conditions(head, format)
    return [("Headstart", "yes"), *((reader, takes.format(**says)) for reader, takes in READERS[format])]


def _conditions(head, format):
    """What depends on the head itself."""
    config = head.config
    if format in ("medusa", "medusa-shared"):
        five = f", which builds 5 heads whatever the config says: these are {config.num_heads}"
        one_block = f"no: it takes one residual block per head, these have {config.num_layers}"
        return {
            "five": "" if config.num_heads == 5 else five,
            "tgi_shared": "yes, through `medusa_lm_head.safetensors`" if config.num_layers == 1 else one_block,
        }
    if format == "mlp-speculator":
        return {
            "tgi_scaled": "yes, but it takes no notice of `scale_input`, which is true here"
            if config.scale_input
            else "yes"
        }
    if format == "eagle-vllm":
        return {"original_eagle": "no: it wants the target's embedding in the file" if head.needs_embedding else "yes"}
    if format == "eagle-sglang":
        lost = "no: its `fc` has no bias, this head's has one"
        return {"vllm_eagle": lost if config.fc_bias else "not this dialect: export with `--format eagle-vllm`"}
    if format == "eagle3":
        plain = config.rope_scaling is None and config.num_attention_heads * config.head_dim == config.hidden_size
        return {
            "original_eagle3": "yes"
            if plain
            else "no: it knows no rope scaling, and no heads that are not the hidden size"
        }
    if format == "speculators":
        unknown = "no: it knows no `norm_before_residual`, which is true here"
        return {
            "sglang_eagle3": unknown
            if config.norm_before_residual
            else "not this layout: export with `--format eagle3`"
        }
    return {}
