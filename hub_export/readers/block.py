"""Requirements of each reader on the files of block drafters, and what it does silently if they are not met."""

from .readers import APART, NOTE, SGLANG, TGI, VLLM, Reader, layer_tables

FORMATS_ARE, FROM_LM_HEAD = APART, False


def takes(files):
    """No problem: what the format demands is in every file that Headstart reads."""
    return ()


def sglang(files):
    if files.head.config.is_causal:
        yield NOTE, "whether it reads `is_causal` was not checked: this head's slots see only the slots before them"


READERS = (
    Reader("z-lab's code", {"dflash": "yes"}, takes),
    Reader(VLLM, {"dflash": "yes"}, takes),
    Reader(SGLANG, {"dflash": "yes"}, sglang),
    Reader(TGI, without="no DFlash support"),
)


def in_card(head):
    config = head.config
    rows = [
        ("reads what enters the target's layers", ", ".join(map(str, config.aux_layer_ids))),
        ("layers", config.num_hidden_layers),
        ("block", f"{config.block_size} tokens, {'causal' if config.is_causal else 'not causal'}"),
        ("logits", "the target's lm_head"),
    ]
    return "A DFlash block drafter", "drafts", rows


def title(config):
    return f"DFlash block drafter, {config['num_hidden_layers']} layer(s)"


def features(head, depth):
    ids = list(head.config.aux_layer_ids)
    return {"kind": "streams", "named_by_file": True, "entering_layers": ids}


tables = layer_tables
