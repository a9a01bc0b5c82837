"""Requirements of each reader on the files of block drafters, and what it does silently if they are not met."""

from .readers import APART, NO, NOTE, SGLANG, TGI, VLLM, WRONG, Reader, layer_tables

FORMATS_ARE, FROM_LM_HEAD = APART, False
OWN_PLACE = "it takes slot i for the token at its own place, and this head's slots predict the next one"
FROM_SLOT = "it counts the window of sliding layers from the slot, and this head's counts from the block"


def zlab(files):
    head = files.head.config
    if head.edge_rank:
        yield WRONG, "it passes over the edge and drafts by the slots alone"
    if head.sample_from_anchor:
        yield WRONG, OWN_PLACE
    if head.is_causal:
        yield WRONG, "it lets a slot see its whole block, and this head's see only the slots before them"
    elif head.sliding_is_causal:
        yield (
            WRONG,
            "it lets a slot of a sliding layer see its whole block, and this head's see only the slots before them there",
        )
    if head.window_of_block:
        yield WRONG, FROM_SLOT
    if head.draft_vocab_size:
        yield WRONG, "it drafts with the target's lm_head, not with the one in the file"
    if "embed_tokens.weight" in files.tensors:
        yield NOTE, "it drafts with the target's embedding, not with the one in the file"


def sglang(files):
    yield from vllm(files)
    head = files.head.config
    if head.is_causal:
        yield NOTE, "whether it reads `is_causal` was not checked: this head's slots see only the slots before them"
    if head.num_scores != head.vocab_size:
        yield NOTE, "whether it reads a draft vocabulary was not checked: this head has one"


def vllm(files):
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
    """No problem: what the format demands is in every file that Headstart reads."""
    return ()


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
    if config.edge_rank:
        rows.append(("edge", f"of rank {config.edge_rank}, from the token before"))
    if config.confidence:
        rows.append(("confidence", f"from the state{' and the token before' * config.confidence_sees_token}"))
    return f"A {'DSpark' if config.edge_rank else 'DFlash'} block drafter", "drafts", rows


def title(config):
    kind = "DSpark" if config["edge_rank"] else "DFlash"
    return f"{kind} block drafter, {config['num_hidden_layers']} layer(s)"


def features(head, depth):
    ids = list(head.config.aux_layer_ids)
    return {"kind": "streams", "named_by_file": True, "entering_layers": ids}


tables = layer_tables
