"""States of the far chunks of a batch of chains, whose contexts differ: programs share out a list of (request, chunk).

    q [B, N, HQ, D], kv and block_table as in tree_attention.py, committed [B] = L
    ->  states [B, HK, C, N G, D] and stats [B, HK, C, N G, 2] of the chunks from FIRST_FAR on, of the tiles wholly below L

prefill_attention.py walks the near chunks and merges these. Where one program walked a request's whole context, all would wait for
the longest. The number of programs is fixed; each finds its chunks from the lengths, so a batch without a long context costs the
launch alone. C: far chunks that the table can hold.
"""

import torch

from ..jit import jit, tl, triton
from ..linear.linear_prefill import num_multiprocessors
from ..overlap import await_previous, can_overlap, overlap, release_next
from .attention_fold import (
    FAR,
    FIRST_FAR,
    PAGE,
    block_rows,
    chunk_at,
    chunk_start,
    count_stages,
    fold_chunk,
    load_rows,
    num_chunks,
    pad_dim,
    page_at,
    store_state,
    tile_sources,
)


@jit(
    do_not_specialize=["B", "R", "C", "blocks", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_table", "committed"],
)
def _far_kernel(
    q, k_cache, v_cache, block_table, committed, stats, states, B, R, C, blocks, table_stride, scale, squash, window,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, REQUESTS: tl.constexpr, ROWS: tl.constexpr,
    FAR_CHUNK: tl.constexpr, FAR_TILE: tl.constexpr, WINDOW: tl.constexpr, TENSOR_MAP: tl.constexpr,
    OVERLAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """B of at most REQUESTS requests, R = N G rows in `blocks` blocks of ROWS"""
    G: tl.constexpr = HQ // HK
    CACHE: tl.constexpr = ".cg" if LATE else ""
    if not LATE:
        await_previous(OVERLAP)
    release_next(OVERLAP)
    i = tl.arange(0, REQUESTS)
    lengths = tl.load(committed + i, mask=i < B, other=0, cache_modifier=CACHE).to(tl.int32)
    tails = lengths // 64  # the tile of L and those after it are the last pass's
    firsts = tl.zeros((REQUESTS,), tl.int32)
    if WINDOW:
        firsts = tl.maximum(lengths - window + 1, 0) // 64
    first_chunks = tl.maximum(chunk_at(firsts * 64), FAR_CHUNK)
    counts = tl.where(tails > FAR_TILE, chunk_at(tails * 64) - first_chunks + 1, 0)
    ends = tl.cumsum(counts, 0)
    num_items = tl.sum(counts) * HK * blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        place = item // (HK * blocks)
        request = tl.sum((ends <= place).to(tl.int32), 0)
        chosen = i == request
        length = tl.sum(tl.where(chosen, lengths, 0), 0)
        tail = length // 64
        # The last chunks, which are the longest, come first.
        open_chunk = chunk_at(tail * 64)
        c = open_chunk - (place - tl.sum(tl.where(chosen, ends - counts, 0), 0))
        first = 0
        if WINDOW:
            first = tl.maximum(length - window + 1, 0) // 64
        begin, end = tl.maximum(chunk_start(c) // 64, first), tl.minimum(chunk_start(c + 1) // 64, tail)
        if begin < end:
            b, h = request.to(tl.int64), item % HK
            r = item // HK % blocks * ROWS + tl.arange(0, ROWS)
            ok = r < R
            lowest = length + r // G - window + 1
            query = load_rows(q, (b * (R // G) + r // G) * HQ + h * G + r % G, ok, D, DIM, CACHE)
            table = block_table + b * table_stride
            m, l, acc = fold_chunk(
                query, k_cache, v_cache, table, page_at(table, begin, end), h, begin, end, lowest, scale, squash,
                HK, D, DIM, ROWS, WINDOW, TENSOR_MAP,
            )  # fmt: skip
            store_state(stats, states, ((b * HK + h) * C + c - FAR_CHUNK) * R + r, ok, m, l, acc, D, DIM)
    if LATE:  # noqa: SIM102  (known to the compiler)
        if tl.program_id(0) == 0:  # one program waits for all
            await_previous(OVERLAP)


def far_states(q, kv, block_table, committed, num_kv_heads, options, late=False):
    """(stats, states) as above, those of chunks that a request does not have undefined.  late: see overlap.py

    block_table [B, P], P more than the near chunks' pages. The operands are checked by the caller.
    """
    batch, num_nodes, num_heads, dim = q.shape
    slots = num_chunks(block_table.shape[1] * PAGE) - FIRST_FAR
    num_rows, rows = num_nodes * (num_heads // num_kv_heads), block_rows(dim, q.dtype, q.device)
    states = torch.empty(batch, num_kv_heads, slots, num_rows, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch, num_kv_heads, slots, num_rows, 2, dtype=torch.float32, device=q.device)
    lanes, blocks, (scale, squash) = pad_dim(dim), triton.cdiv(num_rows, rows), options.factors(dim)
    keys, values, tensor_map = tile_sources(*kv.unbind(), lanes)
    programs = min(2 * num_multiprocessors(q.device), batch * num_kv_heads * slots * blocks)
    _far_kernel[(programs,)](
        q.contiguous(), keys, values, block_table, committed, stats, states, batch, num_rows, slots, blocks,
        block_table.stride(0), scale, squash, options.window or 0,
        HQ=num_heads, HK=num_kv_heads, D=dim, DIM=lanes, REQUESTS=max(256, triton.next_power_of_2(batch)), ROWS=rows,
        FAR_CHUNK=FIRST_FAR, FAR_TILE=FAR // PAGE, WINDOW=options.window is not None, TENSOR_MAP=tensor_map,
        LATE=late and tensor_map and can_overlap(q.device), num_warps=rows // 16,
        num_stages=count_stages(dim, q.dtype, q.device), enable_fp_fusion=False, **overlap(q),
    )  # fmt: skip
    return stats, states
