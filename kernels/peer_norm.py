"""A residual addition and RMSNorm whose rows several ranks add: each sends the others its part of a row, and waits for theirs.

    normed, total = peer_add_rms_norm(PeerParts(parts, place, peers), residual, w, eps)     # on all ranks, of as many rows

The bits are those of add_rms_norm (rms_norm.py) on the parts of all ranks, added in pairs. A program has one row. It meets the
programs of that row on the other ranks, so a row waits for no other one, and a step has a kernel less for each sum. At most ROWS
rows: where a GPU does not hold so many programs, as an A100 with eight ranks and rows of 8,192, the lowest rows run first on all
ranks, since GPUs start programs in the order of their numbers.

Buffers, flags and `stop`: peer_gather.py. As there, a buffer is written again only after a call on the other one, whose flags each
rank raises when the kernels before it have ended, whichever rows they had.

Letters: R ranks, M rows, H their width.
"""

from typing import NamedTuple

import torch

from .jit import jit, tl, triton
from .linear.linear import empty_rows
from .overlap import await_previous, overlap, release_next
from .peer_gather import ROWS, Peers, meet
from .rms_norm import add_to_residual, aligned, num_warps, store_normed, sum_in_pairs

SIZES = (2, 4, 8)
PIECE = 2048  # at most


class PeerParts(NamedTuple):
    """Sums of which a rank holds its own part, for a norm to send, and to add up."""

    parts: torch.Tensor  # float32 [R, M, H] in this rank's buffer; the other ranks write theirs
    place: int  # byte of the buffer where it begins, a multiple of 16
    peers: Peers  # on GPUs that write each other's memory


@jit(do_not_specialize=["place", "num_rows"])
def _peer_add_rms_norm(
    parts, residual, w, normed, total, buffers, flags, counts, stop, place, num_rows, width, eps, multiplier,
    SCALED: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row; arguments as _add_rms_norm and _peer_gather have them. It is sent in pieces: loaded in the layout of a store"""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row.to(tl.int64) * width + column
    stride = num_rows.to(tl.int64) * width
    await_previous(OVERLAP)
    release_next(OVERLAP)
    for start in tl.static_range(0, BLOCK, PIECE):
        piece = start + tl.arange(0, PIECE)
        sent = RANK * stride + row.to(tl.int64) * width + piece
        own = tl.load(parts + sent, mask=piece < width)
        for step in tl.static_range(1, SIZE):
            slot = (tl.load(buffers + (RANK + step) % SIZE) + place).to(parts.dtype)
            tl.store(tl.multiple_of(slot, 16) + sent, own, mask=piece < width)
    weight = tl.load(w + column, mask=inside, other=0.0)
    h = tl.load(residual + at, mask=inside, other=0.0)
    tl.debug_barrier()  # what all threads of the program have written is told by one of them
    meet(flags, counts + 2 + row, stop, (1 + row) * SIZE, RANK, SIZE, False)
    tl.debug_barrier()  # and what that one was told holds for all
    x = sum_in_pairs(parts, at, stride, inside, SIZE).to(h.dtype)
    h = add_to_residual(x, h, total, at, inside, multiplier, SCALED)
    store_normed(h, weight, normed, at, inside, width, eps)


def peer_add_rms_norm(sums, residual, w, eps, multiplier=1.0):
    """add_rms_norm of the parts of all ranks, added in pairs, neighbours first: (rms_norm(s, w), s).

    sums: PeerParts, this rank's part being there; residual [M, H], the same on all ranks, M at most ROWS; w [H] -> two [M, H] in
    the dtype of residual. Void once a rank has ended. Raises ValueError for shapes that do not fit.
    """
    size, (rows, width) = sums.peers.size, residual.shape
    if sums.parts.shape != (size, rows, width) or w.shape != (width,) or size not in SIZES or rows > ROWS:
        raise ValueError(
            f"peer_add_rms_norm takes parts [R, M, H] of {', '.join(map(str, SIZES))} ranks and at most {ROWS} rows, "
            f"residual [M, H] and w [H], got {tuple(sums.parts.shape)} of {size} ranks, {tuple(residual.shape)} and "
            f"{tuple(w.shape)}"
        )
    if w.dtype != residual.dtype:
        raise ValueError(f"the norm's weight must be {residual.dtype} like the rows, got {w.dtype}")
    residual, w = aligned(residual), aligned(w)
    normed, total = empty_rows(rows, width, residual.dtype, residual.device), torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    if rows:
        peers = sums.peers
        _peer_add_rms_norm[(rows,)](
            sums.parts, residual, w, normed, total, peers.buffers, peers.flags, peers.counts, peers.stop, sums.place, rows, width,
            eps, multiplier, multiplier != 1, block, min(block, PIECE), peers.rank, size,
            num_warps=num_warps(block), enable_fp_fusion=False, **overlap(residual),
        )  # fmt: skip
    return normed, total
