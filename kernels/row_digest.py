"""The bits of rows as one number, for ranks to compare what each of them has computed.

    add_digest(total, x, places, first)     total += the words of all rows of x whose place is `first` or later

Words are 32 bits wide, and added as integers: the order of the sum does not matter, and one that is too large wraps.
"""

import torch

from .jit import jit, on_triton, tl, triton
from .overlap import await_previous, overlap, release_next

_BLOCK = 1024  # words that a program reads at a time


def add_digest_reference(total, x, places, first):
    """The same in plain torch."""
    total += words_of_rows(x).sum(1, dtype=torch.int64)[places >= first].sum()


def words_of_rows(x):
    """Rows as integers of 32 bits, of 16 where these do not fill them.  [M, H] -> [M, W]"""
    words = x.contiguous().view(torch.int16)
    return words.view(torch.int32) if words.shape[1] % 2 == 0 else words


@jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["places"])
def _add_digest(words, places, total, first, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One row."""
    await_previous(OVERLAP)
    release_next(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        found += tl.load(words + row * width + start + column, mask=inside, other=0).to(tl.int64)
    if tl.load(places + row) >= first:
        tl.atomic_add(total, tl.sum(found, 0), sem="relaxed")


def add_digest(total, x, places, first):
    """Add the words of rows to `total`, in place.  total int64 [1]; x [M, H], of 2 bytes an element or more; places [M] integers

    Raises ValueError for shapes that do not fit.
    """
    if total.shape != (1,) or total.dtype != torch.int64 or x.dim() != 2 or places.shape != x.shape[:1]:
        raise ValueError(
            f"add_digest takes total int64 [1], x [M, H] and places [M], got {total.dtype} {tuple(total.shape)}, "
            f"{tuple(x.shape)} and {tuple(places.shape)}"
        )
    if not on_triton(x):
        add_digest_reference(total, x, places, first)
        return
    words = words_of_rows(x)
    if words.numel():
        block = min(triton.next_power_of_2(words.shape[1]), _BLOCK)
        _add_digest[(len(words),)](
            words, places.contiguous(), total, first, words.shape[1], block, num_warps=4, **overlap(x)
        )
