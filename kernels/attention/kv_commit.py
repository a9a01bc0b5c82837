"""Move the KV of accepted draft nodes to where the committed positions lie, all layers at once.

    kv [layers, 2, S * HK, D]     row (page * HK + head) * PAGE + offset
    block_table [B, P] pages; committed [B] = L; path [B, J] node numbers; num_accepted [B]

    for j = 0 .. num_accepted:    position L + j takes the KV of place L + path[j]

All sources are read before anything is written, because sources and destinations overlap. Moves bits, computes nothing.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from .tree_attention import PAGE

_TILE = 8192  # elements that one program holds between reading and writing, as far as the path's length allows


def kv_rows(block_table, places, num_kv_heads):
    """Rows of the cache that hold logical places [B, J].  -> [B, J, HK]"""
    pages = block_table.long().gather(1, places // PAGE)
    head = torch.arange(num_kv_heads, device=places.device)
    return (pages[:, :, None] * num_kv_heads + head) * PAGE + (places % PAGE)[:, :, None]


def kv_commit_reference(kv, block_table, committed, path, num_accepted, num_kv_heads):
    """The same in plain torch operations. Nodes of `path` after num_accepted are not moved."""
    # Entries after num_accepted must change nothing: they move the root onto itself.
    step = torch.arange(path.shape[1], device=path.device)
    taken = step <= num_accepted.long()[:, None]
    start = committed.long()[:, None]
    source = start + torch.where(taken, path.long(), 0)
    destination = start + torch.where(taken, step, 0)
    moved = kv.index_select(2, kv_rows(block_table, source, num_kv_heads).flatten())
    kv.index_copy_(2, kv_rows(block_table, destination, num_kv_heads).flatten(), moved)


@jit
def _kv_commit(
    kv, block_table, committed, path, num_accepted, layer_stride, num_pages, length,
    HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, STEPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All steps of HEADS heads of one request, in the keys or values of one layer: no other program touches these rows."""
    layer, request = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    r = tl.arange(0, STEPS * HEADS)
    step, head = r // HEADS, tl.program_id(2) * HEADS + r % HEADS
    last = tl.load(num_accepted + request)
    taken = (step <= last) & (step < length) & (head < HK)
    start = tl.load(committed + request).to(tl.int64)
    node = tl.load(path + request * length + step, mask=taken, other=0).to(tl.int64)
    moves = taken & (node != step)
    source, destination = start + node, start + step
    table = block_table + request * num_pages
    source_page = tl.load(table + source // PAGE, mask=moves, other=0).to(tl.int64)
    destination_page = tl.load(table + destination // PAGE, mask=moves, other=0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    base = kv + layer * layer_stride + d[None, :]
    mask = moves[:, None] & (d < D)[None, :]
    rows = tl.load(base + (((source_page * HK + head) * PAGE + source % PAGE) * D)[:, None], mask=mask, other=0.0)
    # Sources and destinations overlap: nothing is written before every thread has read.
    tl.debug_barrier()
    tl.store(base + (((destination_page * HK + head) * PAGE + destination % PAGE) * D)[:, None], rows, mask=mask)


def kv_commit(kv, block_table, committed, path, num_accepted, num_kv_heads):
    """Position L + j takes the KV of place L + path[j], for j = 0 .. num_accepted, in place.

    kv [layers, 2, rows, D]; block_table [B, P], committed [B], path [B, J] with path[:, 0] = 0, num_accepted [B] < J (integers).
    Raises ValueError for shapes that do not fit.
    """
    batch = path.shape[0]
    if kv.dim() != 4 or path.dim() != 2 or block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"kv_commit takes kv [layers, 2, rows, D], block_table [B, P] and path [B, J], got {tuple(kv.shape)}, "
            f"{tuple(block_table.shape)} and {tuple(path.shape)}"
        )
    if committed.shape != (batch,) or num_accepted.shape != (batch,):
        raise ValueError(
            f"kv_commit takes {batch} lengths and counts, got {tuple(committed.shape)}, {tuple(num_accepted.shape)}"
        )
    if not on_triton(kv):
        kv_commit_reference(kv, block_table, committed, path, num_accepted, num_kv_heads)
        return
    if not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous, got strides {kv.stride()}")
    length, dim = path.shape[1], kv.shape[3]
    if batch == 0 or length < 2:
        return  # only the root: it is already in its place
    steps, width = triton.next_power_of_2(length), triton.next_power_of_2(dim)
    heads = min(max(_TILE // (steps * width), 1), triton.next_power_of_2(num_kv_heads))
    _kv_commit[(kv.shape[0] * 2, batch, triton.cdiv(num_kv_heads, heads))](
        kv, block_table.contiguous(), committed.contiguous(), path.contiguous(), num_accepted.contiguous(),
        kv.shape[2] * dim, block_table.shape[1], length, num_kv_heads, dim, PAGE, steps, heads, width, num_warps=4,
    )  # fmt: skip
