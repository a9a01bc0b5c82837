"""Which tokens each layer of a target may see in packed rows: its whole document, a sliding window or a chunk of it.

With `layer_types` in its config (inference/models/layer_reach.py) a decoder of transformers takes a dict of masks by type, else one
mask. Not here: layers without attention, which no mask keeps from reading the document before; `FrozenTarget.check` finds them.

Letters: B rows, T tokens per row.
"""

import torch


def build_masks(reaches, position_ids, document_ids, build):
    """The decoder's attention_mask for packed rows: one mask if all layers see the same, else a dict by layer type.

    reaches: of find_reaches; position_ids (restarting in every document) and document_ids (-1 on padding) [B, T];
    build(document_ids, window): a mask in which a token sees earlier ones of its document, of the last `window` ones if not None.
    """
    length = document_ids.shape[1]
    within = {kind: reach.within(length) for kind, reach in reaches.items()}
    built = {}
    for reach in within.values():
        if reach not in built:
            built[reach] = build(_split(document_ids, position_ids, reach.chunk), reach.window)
    if len(built) == 1:
        return next(iter(built.values()))
    return {kind: built[reach] for kind, reach in within.items()}


def _split(document_ids, position_ids, chunk):
    """Document ids with every chunk of a document as a document of its own. [B, T]"""
    if chunk is None:
        return document_ids
    chunks = document_ids.shape[1] // chunk + 1  # at most, in a document
    return torch.where(document_ids < 0, document_ids, document_ids * chunks + position_ids // chunk)
