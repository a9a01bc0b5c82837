"""Requirements of each reader on the files of Medusa heads, and what it does silently if they are not met."""

import torch

from .readers import APART, BUILDS, NO, SGLANG, TGI, VLLM, WRONG, Asks, Reader, asked, names_target

FORMATS_ARE, FROM_LM_HEAD = APART, True


def original(files):
    head = files.head
    if "medusa_lm_head.pt" not in files.files:
        yield NO, "it opens `medusa_lm_head.pt` and nothing else, which is not here"
    # Its legacy class, which reads heads without lm_heads, builds as many heads as the file has.
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


TGI_ASKS = (
    Asks(
        "medusa_num_layers",
        "it builds as many blocks per head as config.json says ({said}), these have {expected}",
        of="num_layers",
    ),
)


def tgi(files):
    config, head = files.config, files.head.config
    if "medusa_lm_head.safetensors" not in files.files:
        yield NO, "it opens `medusa_lm_head.safetensors` and nothing else, which is not here"
    yield from names_target(files)
    if "architectures" in config:
        yield NO, "config.json has `architectures`: with it, it serves without speculation and says nothing"
    said = config.get("medusa_num_heads")
    if said is None:
        yield NO, "config.json lacks `medusa_num_heads`, by which it knows Medusa heads"
    elif type(said) is not int:
        yield NO, f"config.json's `medusa_num_heads` is {said!r}, which is not a number of heads"
    elif said != head.num_heads:
        kind, verb = (WRONG, "drafts") if said < head.num_heads else (NO, "looks for")
        yield kind, f"it {verb} the {said} heads that config.json says, {head.num_heads} are here"
    yield from asked(files, TGI_ASKS)
    if head.shared_lm_head and head.num_layers > 1:
        yield NO, f"it takes one residual block per head, these have {head.num_layers}"


VLLM_ASKS = (
    Asks("hidden_size", BUILDS, of="hidden_size", default=4096),
    Asks("vocab_size", BUILDS, of="vocab_size", default=32001),
)


def vllm(files):
    config, head = files.config, files.head.config
    if config.get("model_type") != "medusa" or config.get("architectures") != ["MedusaModel"]:
        yield NO, 'config.json must say "model_type": "medusa" and "architectures": ["MedusaModel"]'
    # Its reader takes any key with both words in it.
    heads = [value for key, value in config.items() if "num" in key and "heads" in key] or [5]
    layers = [value for key, value in config.items() if "num" in key and "layers" in key] or [1]
    for what, said, found in (("heads", heads[-1], head.num_heads), ("blocks per head", layers[-1], head.num_layers)):
        if said != found:
            yield WRONG, f"it builds as many {what} as config.json says ({said}), {found} are here"
    yield from asked(files, VLLM_ASKS)
    if config.get("truncated_vocab_size") not in (None, head.vocab_size):
        yield NO, f"config.json's truncated_vocab_size {config['truncated_vocab_size']} needs a `token_map`"
    if not config.get("medusa_fc_bias") and any(name.endswith(".bias") for name in files.tensors):
        yield WRONG, "it drops every bias, as config.json does not say `medusa_fc_bias` true"
    if bool(config.get("original_lm_head")) != head.shared_lm_head:
        yield WRONG, f"config.json's original_lm_head should be {str(head.shared_lm_head).lower()}"


READERS = (
    Reader(
        "the original Medusa code (FasterDecoding)",
        {
            "medusa": "yes, through `medusa_lm_head.pt`",
            "medusa-shared": "by its legacy class, through `medusa_lm_head.pt`",
        },
        original,
    ),
    Reader(TGI, dict.fromkeys(("medusa", "medusa-shared"), "yes, through `medusa_lm_head.safetensors`"), tgi),
    Reader(
        VLLM,
        {"vllm": "0.20 to 0.32 (0.33 removed Medusa)"},
        vllm,
        starts="vLLM 0.20 to 0.32 (which drafts chains, with sampling rules of its own)",
    ),
    Reader(SGLANG, without="no Medusa support"),
)


def in_card(head):
    lm_head = "the target's lm_head, shared" if head.config.shared_lm_head else "an lm_head of its own per head"
    rows = [("residual blocks per head", head.config.num_layers), ("logits", lm_head)]
    return f"{head.num_speculative_tokens} Medusa heads", "draft up to", rows


def title(config):
    blocks = "1 block" if config["num_layers"] == 1 else f"{config['num_layers']} blocks"
    return f"Medusa, {config['num_heads']} heads of {blocks}"


def features(head, depth):
    return {"kind": "final"}


def tables(head):
    return "the target's" if head.uses_target_lm_head else "own, one per head", None
