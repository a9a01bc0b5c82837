"""The k greatest of every row, in one launch: what routers of experts choose by.

    row_top(x, k)   x [M, N] -> values [M, k] in x's dtype, places [M, k] int64, the greatest first, ties to the lowest place

NaN counts as inf. A row's program looks at all of it k times: for rows of some hundred values and a few of them. For many
of a whole vocabulary there is sampling/keep_top.py.
"""

import torch

from .jit import jit, on_triton, tl, triton
from .overlap import await_previous, overlap, release_next
from .rms_norm import num_warps


def row_top_reference(x, k):
    """The first k of a stable sort.  [M, N] -> two [M, k]"""
    key = torch.where(x.isnan(), float("inf"), x)  # torch.sort would put NaN before inf
    places = torch.sort(key, dim=-1, descending=True, stable=True)[1][:, :k]
    return x.gather(-1, places), places


@jit
def _row_top(x, values, places, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_previous(OVERLAP)
    release_next(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    left = column < N
    found = tl.load(x + row * N + column, mask=left, other=0.0)
    key = tl.where(found != found, float("inf"), found.to(tl.float32))
    for i in range(K):
        best = tl.max(tl.where(left, key, float("-inf")), 0)
        place = tl.min(tl.where(left & (key == best), column, BLOCK), 0)
        tl.store(values + row * K + i, tl.sum(tl.where(column == place, found, 0.0), 0))
        tl.store(places + row * K + i, place.to(tl.int64))
        left = left & (column != place)


def row_top(x, k):
    """The k greatest of every row and their places.  [M, N] -> two [M, k]; ValueError for another rank, or k not in 1 .. N"""
    if x.dim() != 2 or not 0 < k <= x.shape[1]:
        raise ValueError(f"row_top takes rows [M, N] and 1 <= k <= N, got {list(x.shape)} and {k}")
    if not on_triton(x):
        return row_top_reference(x, k)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"row_top takes bfloat16, float16 or float32 on a GPU, got {x.dtype}")
    (M, N), how = x.shape, dict(device=x.device)
    values, places = torch.empty(M, k, dtype=x.dtype, **how), torch.empty(M, k, dtype=torch.int64, **how)
    if M:
        block = triton.next_power_of_2(N)
        _row_top[(M,)](x.contiguous(), values, places, N, k, block, num_warps=num_warps(block), **overlap(x))
    return values, places
