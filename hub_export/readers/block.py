"""Requirements of each reader on the files of block drafters, and what it does silently if they are not met."""

from .readers import APART, NO, NOTE, SGLANG, TGI, VLLM, WRONG, Reader, layer_tables

FORMATS_ARE, FROM_LM_HEAD = APART, False
OWN_PLACE = "it takes slot i for the token at its own place, and this head's slots predict the next one"
FROM_SLOT = "it counts the window of sliding layers from the slot, and this head's counts from the block"


def _dflash2(files):
    """What every reader of a DFlash2 asks."""
    head = files.head.config
    if head.selector_rank or head.conv_kernel_size:
        yield NOTE, "versions before 2026-08 know no DFlash2"


def _lone_part(head):
    """The part of DFlash2 that a head has without the other, in words; "" for none or both."""
    if bool(head.selector_rank) == bool(head.conv_kernel_size):
        return ""
    return "a selector" if head.selector_rank else "convolutions"


def _scales(head):
    """What a head's scales and cap do, in words; "" for none."""
    said = [f"logits times {head.output_multiplier:g}"] * (head.output_multiplier != 1)
    said += [f"logits capped at {head.final_logit_softcapping:g}"] * (head.final_logit_softcapping != 0)
    said += [f"embeddings times {head.input_embedding_scale:g}"] * (head.input_embedding_scale != 1)
    return ", ".join(said)


def zlab(files):
    yield from _dflash2(files)
    head = files.head.config
    if scales := _scales(head):
        yield NOTE, f"versions before 2026-08 scale and cap nothing, and this head has {scales}"
    if part := _lone_part(head):
        yield NOTE, f"whether it reads files with {part} alone was not checked"
    if head.edge_rank:
        yield WRONG, "it passes over the edge and drafts by the slots alone"
    if head.sample_from_anchor:
        yield WRONG, OWN_PLACE
    nested = files.config.get("dflash_config") or {}
    if (head.is_causal or head.sliding_layers) and "is_causal" not in files.config and "causal" in nested:
        yield WRONG, "it reads `is_causal` at the top of config.json, and no `causal` in dflash_config"
    if head.is_causal:
        yield (
            NOTE,
            "versions before 2026-08 let a slot see its whole block, and this head's see only the slots before them",
        )
    elif head.sliding_is_causal:
        yield (
            NOTE,
            "versions before 2026-08 let a slot of a sliding layer see its whole block, and this head's see only the slots before "
            "them there",
        )
    if head.window_of_block:
        yield WRONG, FROM_SLOT
    if head.draft_vocab_size:
        yield WRONG, "it drafts with the target's lm_head, not with the one in the file"
    if "embed_tokens.weight" in files.tensors:
        yield NOTE, "it drafts with the target's embedding, not with the one in the file"


def sglang(files):
    yield from _dflash2(files)
    yield from _serving(files)
    head = files.head.config
    if scales := _scales(head):
        yield NOTE, f"whether it scales and caps was not checked: this head has {scales}"
    if head.is_causal:
        yield NOTE, "whether it reads `is_causal` was not checked: this head's slots see only the slots before them"
    if head.num_scores != head.vocab_size:
        yield NOTE, "whether it reads a draft vocabulary was not checked: this head has one"


def vllm(files):
    yield from _dflash2(files)
    if part := _lone_part(files.head.config):
        yield NO, f"it builds both of DFlash2's parts, and this head has {part} alone"
    head = files.head.config
    if not (head.selector_rank and head.conv_kernel_size) and (scales := _scales(head)):
        yield WRONG, f"it scales and caps for DFlash2 alone, and this head has {scales}"
    yield from _serving(files)


def _serving(files):
    """The problems of vLLM and SGLang."""
    head = files.head.config
    if head.window_of_block:
        yield NOTE, FROM_SLOT + ": a slot misses as many of the oldest tokens as slots stand before it, and one"
    if head.sliding_layers and not head.sliding_is_causal:
        yield (
            NOTE,
            "whether its attention lets slots of a sliding layer see their whole block was not checked: this head's do",
        )
    if head.confidence and not head.edge_rank:
        yield NO, "it builds an edge of `markov_rank` 0 beside the confidence"
    elif head.sample_from_anchor and not head.edge_rank:
        yield NO, OWN_PLACE
    elif head.edge_rank and not head.sample_from_anchor and "sample_from_anchor" not in _said(files):
        yield (
            WRONG,
            "config.json says no `sample_from_anchor`: it takes this head's slots for those that predict the next token",
        )


def _said(files):
    return files.config | (files.config.get("dflash_config") or {})


def library(files):
    """What the format demands is in every file that Headstart writes in it."""
    yield from _dflash2(files)


READERS = (
    Reader("z-lab's code", {"dflash": "yes"}, zlab),
    Reader(VLLM, {"dflash": "yes", "speculators": "yes", "deepspec": "yes"}, vllm),
    Reader(SGLANG, {"dflash": "yes", "deepspec": "yes"}, sglang),
    Reader("the `speculators` library", {"speculators": "yes"}, library),
    Reader(TGI, without="no DFlash support"),
)


def in_card(head):
    config = head.config
    slots = f"{config.block_size} tokens, {'causal' if config.is_causal else 'not causal'}"
    rows = [
        ("reads what enters the target's layers", ", ".join(map(str, config.aux_layer_ids))),
        ("layers", config.num_hidden_layers),
        ("block", f"{slots}, the first slot predicts too" if config.sample_from_anchor else slots),
    ]
    if config.sliding_layers:
        causal = "causal" if config.sliding_is_causal else "not causal"
        since = "before the block" if config.window_of_block else "up to the slot"
        layers = ", ".join(map(str, config.sliding_layers))
        rows.append(("sliding layers", f"{layers}: the last {config.sliding_window} tokens {since}, {causal}"))
    if config.draft_vocab_size is None:
        rows.append(("logits", "the target's lm_head"))
    else:
        rows.append(("logits", f"its own lm_head over {config.draft_vocab_size} of {config.vocab_size} tokens"))
    if scales := _scales(config):
        rows.append(("scales", scales))
    if config.edge_rank:
        rows.append(("edge", f"of rank {config.edge_rank}, from the token before"))
    if config.confidence:
        rows.append(("confidence", f"from the state{' and the token before' * config.confidence_sees_token}"))
    if config.selector_rank:
        chosen = f"among {config.selector_top_k} tokens by the token before"
        rows.append(("selector", f"of rank {config.selector_rank}, {chosen}"))
    if config.conv_kernel_size:
        shared = f"corrections shared by {config.conv_group_size} channels"
        rows.append(("convolutions", f"over {config.conv_kernel_size} slots, {shared}"))
    return f"A {_member(vars(config))} block drafter", "drafts", rows


def _member(config):
    """The name of a member of the family, by its parts.  config: a BlockConfig as a dict"""
    if config["edge_rank"]:
        return "DSpark"
    return "DFlash2" if config["selector_rank"] or config["conv_kernel_size"] else "DFlash"


def title(config):
    return f"{_member(config)} block drafter, {config['num_hidden_layers']} layer(s)"


def features(head, depth):
    ids = list(head.config.aux_layer_ids)
    return {"kind": "streams", "named_by_file": True, "entering_layers": ids}


tables = layer_tables
