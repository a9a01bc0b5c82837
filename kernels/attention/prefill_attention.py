"""Causal attention of packed prompt chunks over a paged KV cache, with the bits of decoding the positions one by one.

    q [T, HQ, D]          queries of the chunks of R requests, one after the other, rotated
    kv [2, S * HK, D]     keys and values of one layer, those of the chunks already written; rows as in tree_attention.py
    index (PrefillIndex)  which positions the rows hold and where their keys lie
    ->  [T, HQ, D]        softmax(scale q k^T) v over all positions up to the row's own, in q's dtype

Letters: R requests, T tokens of all chunks, HQ query heads, HK key heads, G = HQ / HK, D head dimension in DIM lanes. A program
takes ROWS // G tokens of one request with the G heads of one key head and walks the tiles in the order of positions: first,
without a mask, the tiles that all its rows see, then the last one or two with a mask. Tiles, chunks and the fold are those of
attention_fold.py, so a prompt may be cut into chunks anywhere. With a window W a row sees its own position and the W - 1 before it.
Chains of drafted tokens are such chunks, too, each of N rows. Runs on a GPU; on the CPU a prompt goes through tree_attention.py.
"""

from dataclasses import dataclass

import torch

from ..jit import jit, tl, triton
from ..linear.linear import empty_rows
from ..linear.linear_prefill import num_multiprocessors
from ..overlap import await_previous, can_overlap, overlap, release_next
from .attention_fold import (
    EVERYTHING,
    FAR,
    FIRST_FAR,
    PAGE,
    block_rows,
    check_attention,
    chunk_at,
    chunk_start,
    count_stages,
    empty_state,
    finish,
    fold,
    load_rows,
    load_state,
    merge,
    pad_dim,
    page_at,
    starts_chunk,
    tile_sources,
    walk,
)


@dataclass(frozen=True)
class PrefillIndex:
    """Where the rows of one prefill pass stand. Made once per pass, used by every layer.

    On a GPU its tensors must be written two launches or more before the keys are (overlap.py).
    """

    block_table: torch.Tensor  # [R, P] page numbers
    starts: torch.Tensor  # [R] position of each chunk's first token
    counts: torch.Tensor  # [R] tokens of each chunk
    # The same numbers on the host, which set the number of programs; None, in a graph: any counts that make up to num_rows tokens
    host_counts: tuple | None
    num_kv_heads: int  # HK
    num_rows: int  # T
    nodes: int = 0  # tokens of every chunk, where all have the same number; `counts` is not read then

    def num_blocks(self, tokens):
        """Number of blocks of so many tokens that hold all chunks, or could."""
        if self.host_counts is None:
            return triton.cdiv(self.num_rows, tokens) + len(self.starts)
        return sum(triton.cdiv(count, tokens) for count in self.host_counts)

    def attend(self, q, kv, options=EVERYTHING, out=None):
        """q [T, HQ, D], kv [2, rows, D] of one layer -> [T, HQ, D]; see prefill_attention."""
        return prefill_attention(q, kv, self, options, out)


def build_prefill_index(block_table, starts, counts, num_kv_heads, device):
    """Index the positions that the packed rows hold.

    block_table [R, P] page numbers on the device, int32 or int64; starts and counts [R] on the host (list or tensor): chunk r
    holds the positions starts[r] .. starts[r] + counts[r] - 1. Copies to the device without waiting for it.
    """
    starts, counts = (torch.as_tensor(x, dtype=torch.int32) for x in (starts, counts))
    if not starts.shape == counts.shape == block_table.shape[:1] or (counts < 1).any() or (starts < 0).any():
        raise ValueError(
            f"build_prefill_index takes a start >= 0 and a count >= 1 for each of {block_table.shape[0]} requests, "
            f"got {starts.tolist()} and {counts.tolist()}"
        )
    both = torch.stack((starts, counts))
    if torch.device(device).type == "cuda":
        both = both.pin_memory()
    both = both.to(device, non_blocking=True)
    counts = tuple(counts.tolist())
    return PrefillIndex(block_table, both[0], both[1], counts, num_kv_heads, sum(counts))


def prefill_attention_reference(q, k, v, start, scale=None, window=None):
    """The formula for one chunk on dense keys, any dtype.  q [T, HQ, D], k and v [start + T, HK, D] -> [T, HQ, D]"""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    position = start + torch.arange(q.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)
    hidden = key > position if window is None else (key > position) | (key <= position - window)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@jit(
    do_not_specialize=["C", "R", "T", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_table", "starts", "counts"],
)
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    k_map,
    v_map,
    block_table,
    starts,
    counts,
    out,
    stats,
    states,
    sinks,
    C,
    R,
    T,
    table_stride,
    scale,
    squash,
    window,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    REQUESTS: tl.constexpr,
    NODES: tl.constexpr,
    FAR_CHUNK: tl.constexpr,
    FAR_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    TENSOR_MAP: tl.constexpr,
    OVERLAP: tl.constexpr,
    LATE: tl.constexpr,
):
    """NODES: tokens of every chunk; 0: as `counts` says. stats, states: C states of each row, of the far chunks, or None."""
    G: tl.constexpr = HQ // HK
    TOKENS: tl.constexpr = ROWS // G
    CACHE: tl.constexpr = ".cg" if LATE else ""
    h, block = tl.program_id(0), tl.program_id(1)
    is_first = (h == 0) & (block == 0)
    # The request of this block, its first token, and the block's number in it: the longest rows first. Lengths and pages are older
    # than the kernel before: they are read while it runs.
    if NODES > 0:
        BLOCKS: tl.constexpr = (NODES + TOKENS - 1) // TOKENS
        request = block // BLOCKS
        packed = request * NODES
        count = NODES
        block = BLOCKS - 1 - block % BLOCKS
        spare = block < 0
    else:
        i = tl.arange(0, REQUESTS)
        count = tl.load(counts + i, mask=i < R, other=0, cache_modifier=".cg").to(tl.int32)
        blocks = (count + TOKENS - 1) // TOKENS
        ends = tl.cumsum(blocks, 0)
        # A graph has programs for the most blocks that its rows could make. Those to spare write zeros to the rows after the last
        # chunk: they go through the layers like others, and what they leave in page 0 must be finite.
        spare = block >= tl.sum(blocks)
        request = tl.minimum(tl.sum((ends <= block).to(tl.int32), 0), R - 1)
        packed = tl.sum(tl.where(spare | (i < request), count, 0), 0)
        count = tl.where(spare, T - packed, tl.sum(tl.where(i == request, count, 0), 0))
        block = tl.where(spare, block - tl.sum(blocks), tl.sum(tl.where(i == request, ends, 0), 0) - 1 - block)
    start = tl.load(starts + request, cache_modifier=".cg").to(tl.int32)
    table = block_table + request.to(tl.int64) * table_stride

    r, x = tl.arange(0, ROWS), tl.arange(0, 64)
    token = block * TOKENS + r // G
    ok = (r < TOKENS * G) & (token < count)
    rows = (packed + token).to(tl.int64) * HQ + h * G + r % G
    position = start + token
    lowest = position - window + 1
    low = start + block * TOKENS  # positions of the block's first and last token
    high = start + tl.minimum((block + 1) * TOKENS, count) - 1
    first = 0
    if WINDOW:
        first = tl.maximum(low - window + 1, 0) // 64
    whole = tl.where(spare, 0, (low + 1) // 64)  # tiles below it are seen by every row
    end = tl.where(spare, 0, high // 64 + 1)
    if stats is not None:
        whole = tl.minimum(whole, FAR_TILE)
    begin = tl.maximum(whole, first)
    page = page_at(table, first, whole)
    if not LATE:
        await_previous(OVERLAP)
    release_next(OVERLAP)
    query = load_rows(q, rows, ok, D, DIM, CACHE)
    m, l, acc = empty_state(ROWS, DIM)
    chunk_m, chunk_l, chunk_acc = empty_state(ROWS, DIM)
    m, l, acc, chunk_m, chunk_l, chunk_acc = walk(
        query, k_map, v_map, table, page, h, first, whole, lowest, m, l, acc, chunk_m, chunk_l, chunk_acc, scale, squash,
        HK, D, DIM, ROWS, WINDOW, TENSOR_MAP,
    )  # fmt: skip
    if stats is not None:  # noqa: SIM102  (known to the compiler, the inner condition is not)
        if start // 64 > FAR_TILE:
            if LATE:
                await_previous(OVERLAP)
            # The far chunks wholly below L, then the tiles of the open chunk below L.
            begin = start // 64
            first_chunk, open_chunk = tl.maximum(chunk_at(first * 64), FAR_CHUNK), chunk_at(begin * 64)
            m, l, acc = merge(m, l, acc, chunk_m, chunk_l, chunk_acc)
            at = (request.to(tl.int64) * HK + h) * C * NODES * G + token * G + r % G
            for c in range(first_chunk, open_chunk):
                chunk_m, chunk_l, chunk_acc = load_state(stats, states, at + (c - FAR_CHUNK) * NODES * G, ok, D, DIM)
                m, l, acc = merge(m, l, acc, chunk_m, chunk_l, chunk_acc)
            started = ok & (begin > tl.maximum(first, chunk_start(open_chunk) // 64))
            chunk_m, chunk_l, chunk_acc = load_state(
                stats, states, at + (open_chunk - FAR_CHUNK) * NODES * G, started, D, DIM
            )
    for t in tl.range(begin, end, num_stages=1):
        if starts_chunk(t * 64):
            m, l, acc = merge(m, l, acc, chunk_m, chunk_l, chunk_acc)
            chunk_m, chunk_l, chunk_acc = empty_state(ROWS, DIM)
        key = t * 64 + x
        page = page_at(table, t, end)
        at = (page * HK + h) * 64 + x
        k = load_rows(k_cache, at, key <= high, D, DIM, CACHE)
        v = load_rows(v_cache, at, key <= high, D, DIM, CACHE)
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen &= key[None, :] >= lowest[:, None]
        chunk_m, chunk_l, chunk_acc = fold(query, k, v, seen, chunk_m, chunk_l, chunk_acc, scale, squash, True)
    m, l, acc = merge(m, l, acc, chunk_m, chunk_l, chunk_acc)
    result = finish(m, l, acc, sinks, h * G + r % G, ok)
    result = tl.where(spare, 0.0, result).to(out.dtype.element_ty)
    d = tl.arange(0, DIM)
    tl.store(out + rows[:, None] * D + d[None, :], result, mask=ok[:, None] & (d < D)[None, :])
    if LATE:  # noqa: SIM102  (known to the compiler)
        if is_first:  # one program waits for all: this pass has ended only when the one before has
            await_previous(OVERLAP)


def prefill_attention(q, kv, index, options=EVERYTHING, out=None):
    """Causal attention of packed chunks; shapes as in the legend above.

    options: AttentionOptions; out: where to write, contiguous. Rows that belong to no chunk are zero. Raises ValueError for shapes
    it does not take.
    """
    check_attention(q, kv, index.num_kv_heads, options)
    if q.shape[0] != index.num_rows:
        raise ValueError(f"prefill_attention takes {index.num_rows} rows of queries, got {q.shape[0]}")
    return _launch(q, kv, index, options, out)


def chain_attention(q, kv, block_table, starts, num_kv_heads, options, out=None, far=None, late=False):
    """Attention of B chains of N nodes, the keys of all written: node n stands at position starts[b] + n.

    q [B, N, HQ, D], block_table [B, P], starts [B]  ->  [B, N, HQ, D]. far: states [B, HK, C, N G, 2] and [.., D] of the chunks
    from FIRST_FAR on, of the tiles wholly below starts[b]; None: this pass walks them. late: a GPU may run it beside the kernel
    before, which awaited all that this one needs, or makes `far`. The operands are checked by the caller.
    """
    batch, num_nodes = q.shape[:2]
    index = PrefillIndex(block_table, starts, starts, (num_nodes,) * batch, num_kv_heads, batch * num_nodes, num_nodes)
    return _launch(q.flatten(0, 1), kv, index, options, out, far=far, late=late).view(q.shape)


def _launch(q, kv, index, options, out=None, rows=None, num_stages=None, tensor_map=None, far=None, late=False):
    """Launch the kernel. rows, num_stages and tensor_map override the choice made from shapes; every choice gives the same bits."""
    num_heads, dim = q.shape[1:]
    hk, rows = index.num_kv_heads, rows or block_rows(dim, q.dtype, q.device)
    blocks = index.num_blocks(rows // (num_heads // hk))
    q = q.contiguous()
    if out is None:
        out = empty_rows(q.shape[0], num_heads * dim, q.dtype, q.device).view(q.shape)
    k, v = kv.unbind()
    lanes = pad_dim(dim)
    keys, values, tensor_map = tile_sources(k, v, lanes, tensor_map)
    alone = index.nodes > 0 and q.is_cuda and hk * blocks <= num_multiprocessors(q.device)
    (stats, states), window = far or (None, None), options.window
    # A kernel of its own for every power of two, from 16 on: few are compiled, none while people wait.
    requests = 1 if index.nodes else max(16, triton.next_power_of_2(len(index.starts)))
    _prefill_kernel[hk, blocks](
        q, k, v, keys, values, index.block_table, index.starts, index.counts, out,
        stats, states, options.sinks, 0 if states is None else states.shape[2],
        len(index.starts), index.num_rows, index.block_table.stride(0), *options.factors(dim), window or 0,
        HQ=num_heads, HK=hk, D=dim, DIM=lanes, REQUESTS=requests, NODES=index.nodes,
        FAR_CHUNK=FIRST_FAR, FAR_TILE=FAR // PAGE, ROWS=rows,
        WINDOW=window is not None, TENSOR_MAP=tensor_map, LATE=late and tensor_map and can_overlap(q.device),
        num_warps=rows // 16, num_stages=num_stages or count_stages(dim, q.dtype, q.device, alone), enable_fp_fusion=False,
        **overlap(q),
    )  # fmt: skip
    return out
