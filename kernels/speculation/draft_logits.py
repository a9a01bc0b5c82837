"""Logits over a draft vocabulary as logits over the target's: minus infinity for tokens that are never drafted.

logits [M, VD], places [V] (which draft token a token is, or -1)  ->  [M, V]
"""

import torch

from ..jit import jit, on_triton, tl, triton
from ..overlap import await_previous, overlap, release_next

_CHUNK, _ROWS = 2048, 4  # tokens and rows of a program


def places_of(draft_token_ids, vocab_size):
    """Which draft token each token of the target is, or -1.  ids [VD], all different -> int32 [V]"""
    places = torch.full((vocab_size,), -1, dtype=torch.int32, device=draft_token_ids.device)
    places[draft_token_ids] = torch.arange(len(draft_token_ids), dtype=torch.int32, device=places.device)
    return places


def whole_logits_reference(logits, places):
    """The formula in plain torch."""
    return torch.where(places >= 0, logits[:, places.clamp(min=0).long()], -torch.inf)


@jit(do_not_specialize=["num_rows"])
def _whole_logits(
    logits,
    places,
    out,
    num_rows,
    draft_size,
    vocab_size,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    await_previous(OVERLAP)
    release_next(OVERLAP)
    place = tl.load(places + token, mask=inside, other=-1)
    for i in range(ROWS):
        row = (tl.program_id(1) * ROWS + i).to(tl.int64)
        known = (place >= 0) & (row < num_rows)
        x = tl.load(logits + row * draft_size + place, mask=known, other=float("-inf"))
        tl.store(out + row * vocab_size + token, x, mask=inside & (row < num_rows))


def whole_logits(logits, places):
    """Logits [M, V] of the target's tokens from those of draft tokens [M, VD]; places: see places_of."""
    if not on_triton(logits):
        return whole_logits_reference(logits, places)
    (rows, draft_size), vocab_size = logits.shape, len(places)
    out = torch.empty(rows, vocab_size, dtype=logits.dtype, device=logits.device)
    if rows:
        _whole_logits[triton.cdiv(vocab_size, _CHUNK), triton.cdiv(rows, _ROWS)](
            logits.contiguous(),
            places,
            out,
            rows,
            draft_size,
            vocab_size,
            _CHUNK,
            _ROWS,
            num_warps=8,
            **overlap(logits),
        )
    return out
