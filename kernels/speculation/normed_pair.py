"""What an EAGLE-3 layer reads: the normed embedding of a token beside the normed state (arXiv 2503.01840).

    tokens [M], table [V, H], embedding_norm [H], state [M, H], state_norm [H]
    ->  pair [M, 2 H] = rms_norm(table[tokens]), rms_norm(state)  and  rms_norm(state) [M, H] alone

The bits are those of embedding.py and rms_norm.py; one launch takes the place of four.
"""

import torch

from ..embedding import embed
from ..jit import jit, on_triton, tl, triton
from ..linear.linear import empty_rows
from ..overlap import await_previous, overlap, release_next
from ..rms_norm import aligned, num_warps, rms_norm, store_normed


def normed_pair_reference(tokens, table, embedding_norm, state, state_norm, embedding_eps, state_eps):
    """The formula; see normed_pair."""
    normed = rms_norm(state, state_norm, state_eps)
    embedded = rms_norm(embed(tokens, table).to(state.dtype), embedding_norm, embedding_eps)
    return torch.cat((embedded, normed), 1), normed


@jit(do_not_specialize_on_alignment=["tokens"])
def _normed_pair(
    tokens, table, embedding_norm, state, state_norm, pair, normed, width, embedding_eps, state_eps,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of one row the embedding or the state."""
    row, is_state = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    column = tl.arange(0, BLOCK)
    inside = column < width
    await_previous(OVERLAP)
    release_next(OVERLAP)
    weight = tl.load(tl.where(is_state, state_norm, embedding_norm) + column, mask=inside, other=0.0)
    token = tl.load(tokens + row).to(tl.int64)
    h = tl.load(tl.where(is_state, state + row * width, table + token * width) + column, mask=inside, other=0.0)
    eps = tl.where(is_state, state_eps, embedding_eps)
    store_normed(h, weight, pair, (row * 2 + is_state.to(tl.int64)) * width + column, inside, width, eps)
    store_normed(h, weight, normed, row * width + column, inside & is_state, width, eps)


def normed_pair(tokens, table, embedding_norm, state, state_norm, embedding_eps, state_eps):
    """(pair [M, 2 H], normed state [M, H]) of tokens [M] and state [M, H], in the state's dtype.

    table [V, H], embedding_norm and state_norm [H]. Raises ValueError for shapes that do not fit.
    """
    rows, width = state.shape
    if (
        tokens.shape != (rows,)
        or table.shape[1:] != (width,)
        or not embedding_norm.shape == state_norm.shape == (width,)
    ):
        raise ValueError(
            "normed_pair takes tokens [M], table [V, H], state [M, H] and two norms [H], got "
            f"{[tuple(x.shape) for x in (tokens, table, state, embedding_norm, state_norm)]}"
        )
    if not on_triton(state) or not table.dtype == embedding_norm.dtype == state_norm.dtype == state.dtype:
        return normed_pair_reference(tokens, table, embedding_norm, state, state_norm, embedding_eps, state_eps)
    state, table, embedding_norm, state_norm = (aligned(x) for x in (state, table, embedding_norm, state_norm))
    pair = empty_rows(rows, 2 * width, state.dtype, state.device)
    normed = torch.empty_like(state)
    block = triton.next_power_of_2(width)
    if rows:
        _normed_pair[(rows, 2)](
            tokens.contiguous(), table, embedding_norm, state, state_norm, pair, normed, width, embedding_eps, state_eps,
            block, num_warps=num_warps(block), enable_fp_fusion=False, **overlap(state),
        )  # fmt: skip
    return pair, normed
