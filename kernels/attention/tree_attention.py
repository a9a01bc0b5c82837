"""Attention of draft-tree nodes over a paged KV cache, adding in the order of absolute positions.

    q [B, N, HQ, D]       queries of N nodes per request, rotated
    kv [2, S * HK, D]     keys and values of one layer; row (page * HK + head) * PAGE + offset, so a page is [HK, PAGE, D]
    index (TreeIndex)     where each request's and each node's keys lie
    ->  [B, N, HQ, D]     softmax(scale q k^T) v over the committed prefix and the node's own ancestors, in q's dtype

Letters: B requests, N nodes, HQ query heads, HK key heads, G = HQ / HK, D head dimension (DIM lanes), L committed length, A depths
of the tree, R = N G rows of one key head, C states per row. Position x < L of a request lies at its place x (page x // 64 of its
table), node i's key at place L + i. A node of depth d sees the positions up to L + d; with a window W from L + w - W + 1 on, where
its window depth w is d, unless another is given.

Two passes (tiles, chunks, states: attention_fold.py). The *prefix pass* folds the tiles wholly below L for the rows of all nodes
together and leaves one state per chunk. Where the batch is large enough to fill the card, one program walks all chunks, merges
them, and leaves two states, closed and open: the same bits, without a state per chunk in memory. The *tail pass* takes one node
at a time: it goes on from the open chunk's state with the tile that holds L, gathers the node's ancestors by position, and merges.
Both choose their programs from shapes, never from L. A chain in a large batch needs neither: its keys lie in the order of
positions, so it is one pass, a prompt's (prefill_attention.py), beside one for the far chunks (far_chunks.py). On the CPU:
tile_attention.py, the same idea with tiles of 16 keys.
"""

from dataclasses import dataclass

import torch

from ..jit import jit, on_triton, tl, triton
from ..linear.linear import empty_rows
from ..linear.linear_prefill import num_multiprocessors
from ..overlap import await_previous, can_overlap, release_next
from .attention_fold import (
    EVERYTHING,
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
    fold_chunk,
    load_rows,
    load_state,
    merge,
    num_chunks,
    pad_dim,
    page_at,
    starts_chunk,
    store_state,
    tile_sources,
    walk,
)
from .far_chunks import far_states
from .prefill_attention import chain_attention
from .tile_attention import TileRows, build_tile_rows, tile_attention

NUM_PROGRAMS = 512  # of the prefix pass, if chunks are spread over programs
WALK_PROGRAMS = 128  # this many (request, key head, block of rows) fill the card without being divided


@dataclass(frozen=True)
class TreeIndex:
    """Where the keys of every node lie. Made once per forward pass, used by every layer.

    On a GPU its tensors must be written two launches or more before the keys are (overlap.py).
    """

    block_table: torch.Tensor  # [B, P] page numbers
    committed: torch.Tensor  # [B] = L
    depths: torch.Tensor  # [B, N]
    window_depths: torch.Tensor  # [B, N]
    ancestors: torch.Tensor  # [B, N, A]
    num_kv_heads: int  # HK
    tiles: TileRows | None  # rows of the cache, on the CPU only
    is_chain: bool = False  # every node is its parent's only child: node i stands at position L + i

    @property
    def num_rows(self):
        """B * N"""
        return self.depths.numel()

    def attend(self, q, kv, options=EVERYTHING, out=None, late=False):
        """q [B * N, HQ, D], kv [2, rows, D] of one layer -> [B * N, HQ, D]; out, late: see tree_attention."""
        batch, num_nodes = self.depths.shape
        if q.shape[0] != batch * num_nodes:
            raise ValueError(f"attend takes {batch} x {num_nodes} rows of queries, got {q.shape[0]}")
        return tree_attention(q.view(batch, num_nodes, *q.shape[1:]), kv, self, options, out, late).view(q.shape)


def build_tree_index(
    block_table, committed, depths, ancestors, num_kv_heads, dtype=None, is_chain=False, window_depths=None
):
    """Index where the keys of every node lie.

    block_table [B, P] page numbers; committed [B] = L; depths [N] or [B, N] of the nodes; ancestors [N, A] or [B, N, A] the node
    at each depth on the way from the root, itself last (entries after it are ignored). All int32 or int64, parents before
    children. `dtype` of the sums on the CPU, fp32 unless given; is_chain: that node i is the parent of node i + 1 in every request
    (where it is, a GPU may take a shorter way); window_depths: as depths, of what is no chain, None: the depths. On a GPU this
    launches nothing and reads nothing back.
    """
    batch, num_nodes = committed.shape[0], depths.shape[-1]
    depths = depths.expand(batch, num_nodes)
    window_depths = depths if window_depths is None else window_depths.expand(batch, num_nodes)
    assert window_depths.stride() == depths.stride()
    ancestors = ancestors.expand(batch, num_nodes, ancestors.shape[-1])
    nodes, tiles = (block_table, committed, depths, window_depths, ancestors, num_kv_heads), None
    if not on_triton(block_table):
        tiles = build_tile_rows(*nodes, dtype or torch.float32)
    return TreeIndex(*nodes, tiles, is_chain)


def tree_attention_reference(q, k, v, mask, scale=None):
    """The formula on dense keys, any dtype.  q [B, N, HQ, D], k and v [B, S, HK, D], mask [B, N, S] -> [B, N, HQ, D]"""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bnhd,bshd->bhns", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return torch.einsum("bhns,bshd->bnhd", scores.softmax(-1), v)


@jit(
    do_not_specialize=["R", "C", "splits", "table_stride", "depth_stride", "window"],
    do_not_specialize_on_alignment=["committed"],
)
def _prefix_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    committed,
    window_depths,
    stats,
    states,
    R,
    C,
    splits,
    table_stride,
    depth_stride,
    scale,
    squash,
    window,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    WALK: tl.constexpr,
    TENSOR_MAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """With WALK two states of all chunks, closed and open, else one state of each."""
    G: tl.constexpr = HQ // HK
    h, b, split = tl.program_id(0) % HK, tl.program_id(1).to(tl.int64), tl.program_id(2)
    r = tl.program_id(0) // HK * ROWS + tl.arange(0, ROWS)
    ok = r < R
    # Lengths and pages are older than the kernel before: they are read while it runs.
    length = tl.load(committed + b, cache_modifier=".cg").to(tl.int32)
    table = block_table + b * table_stride
    tail = length // 64  # the tile of L and those after it are the tail's
    first = 0
    lowest = tl.zeros((ROWS,), tl.int32)
    if WINDOW:
        first = tl.maximum(length - window + 1, 0) // 64
        node = tl.load(window_depths + b * depth_stride + r // G, mask=ok, other=0, cache_modifier=".cg").to(tl.int32)
        lowest = length + node - window + 1
    first_chunk, open_chunk = chunk_at(first * 64), chunk_at(tail * 64)
    c = open_chunk - split  # the last chunks, which are the longest, come first
    begin, end = tl.maximum(chunk_start(c) // 64, first), tl.minimum(chunk_start(c + 1) // 64, tail)
    if WALK:
        begin, end = first, tail
    page = page_at(table, begin, tl.where(c < first_chunk, 0, end))
    # The tail pass may start once this pass's inputs are there: before its own wait it reads nothing newer. Where programs walk,
    # this pass is launched without overlap: it has one program per multiprocessor, and programs that start early pile up on a few.
    await_previous(OVERLAP)
    release_next(OVERLAP)
    if split <= open_chunk - first_chunk:
        rows = (b * (R // G) + r // G) * HQ + h * G + r % G
        query = load_rows(q, rows, ok, D, DIM, "")
        if WALK:
            m, l, acc = empty_state(ROWS, DIM)
            chunk_m, chunk_l, chunk_acc = empty_state(ROWS, DIM)
            m, l, acc, chunk_m, chunk_l, chunk_acc = walk(
                query, k_cache, v_cache, table, page, h, first, tail, lowest, m, l, acc, chunk_m, chunk_l, chunk_acc,
                scale, squash, HK, D, DIM, ROWS, WINDOW, TENSOR_MAP,
            )  # fmt: skip
            # The chunk of L is open; if no tile of it is full, the last chunk walked has just ended.
            if starts_chunk(tail * 64):
                m, l, acc = merge(m, l, acc, chunk_m, chunk_l, chunk_acc)
                chunk_m, chunk_l, chunk_acc = empty_state(ROWS, DIM)
            at = (b * HK + h) * C * R + r
            store_state(stats, states, at, ok, m, l, acc, D, DIM)
            store_state(stats, states, at + R, ok, chunk_m, chunk_l, chunk_acc, D, DIM)
        else:
            while c >= first_chunk:
                if begin < end:
                    m, l, acc = fold_chunk(
                        query, k_cache, v_cache, table, page, h, begin, end, lowest, scale, squash,
                        HK, D, DIM, ROWS, WINDOW, TENSOR_MAP,
                    )  # fmt: skip
                    at = ((b * HK + h) * C + c) * R + r
                    store_state(stats, states, at, ok, m, l, acc, D, DIM)
                c -= splits
                begin, end = tl.maximum(chunk_start(c) // 64, first), tl.minimum(chunk_start(c + 1) // 64, tail)
                page = page_at(table, begin, tl.where(c < first_chunk, 0, end))


@jit
def _gather(
    k_cache, v_cache, table, path, begin, length, position, lowest, h, A,
    HK: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Keys and values [64, DIM] of the positions from `begin` on a node's path, and which of them the node sees [64]."""
    key = begin + tl.arange(0, 64)
    seen = (key <= position) & (key >= lowest)
    step = key - length
    node = tl.load(path + tl.minimum(tl.maximum(step, 0), A - 1), mask=seen & (step >= 0), other=0).to(tl.int32)
    place = tl.where(step < 0, key, length + node)
    page = tl.load(table + place // 64, mask=seen, other=0).to(tl.int64)
    rows = (page * HK + h) * 64 + place % 64
    return load_rows(k_cache, rows, seen, D, DIM, ""), load_rows(v_cache, rows, seen, D, DIM, ""), seen


@jit(
    do_not_specialize=[
        "N", "A", "C", "table_stride", "depth_stride", "ancestor_batch_stride", "ancestor_node_stride", "window",
    ],
    do_not_specialize_on_alignment=["committed"],
)  # fmt: skip
def _tail_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    committed,
    depths,
    window_depths,
    ancestors,
    stats,
    states,
    sinks,
    out,
    N,
    A,
    C,
    table_stride,
    depth_stride,
    ancestor_batch_stride,
    ancestor_node_stride,
    scale,
    squash,
    window,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    WALK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    G: tl.constexpr = HQ // HK
    h, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, d, g = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, GROUP)
    ok = r < G
    rows = (b * N + n) * HQ + h * G + r
    query = tl.load(q + rows[:, None] * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    length = tl.load(committed + b).to(tl.int32)
    position = length + tl.load(depths + b * depth_stride + n).to(tl.int32)
    table = block_table + b * table_stride
    path = ancestors + b * ancestor_batch_stride + n * ancestor_node_stride
    tail = length // 64 * 64
    first = 0
    lowest = 0
    if WINDOW:
        first = tl.maximum(length - window + 1, 0) // 64 * 64
        lowest = length + tl.load(window_depths + b * depth_stride + n).to(tl.int32) - window + 1
    first_chunk, open_chunk = chunk_at(first), chunk_at(tail)
    k, v, seen = _gather(k_cache, v_cache, table, path, tail, length, position, lowest, h, A, HK, D, DIM)

    # Merge the closed chunks in order, G rows wide. Four are loaded at a time; states after the last chunk are empty.
    await_previous(OVERLAP)  # everything above may run while the prefix pass still runs
    release_next(OVERLAP)
    slot = (b * HK + h) * C
    if WALK:
        open_slot = slot + 1
        started = ok
    else:
        open_slot = slot + open_chunk
        slot += first_chunk
        started = ok & (tail > tl.maximum(first, chunk_start(open_chunk)))
    closed_m, closed_l, closed_acc = empty_state(GROUP, DIM)
    stride = N * G
    # One at a time where a state is large: four would not fit the registers.
    PER_LOAD: tl.constexpr = 4 if GROUP <= 16 else 1
    for c in range(slot, open_slot, PER_LOAD):
        at = (c * N + n) * G + g
        m0, l0, acc0 = load_state(stats, states, at, g < G, D, DIM)
        closed_m, closed_l, closed_acc = merge(closed_m, closed_l, closed_acc, m0, l0, acc0)
        if PER_LOAD == 4:
            m1, l1, acc1 = load_state(stats, states, at + stride, (g < G) & (c + 1 < open_slot), D, DIM)
            m2, l2, acc2 = load_state(stats, states, at + 2 * stride, (g < G) & (c + 2 < open_slot), D, DIM)
            m3, l3, acc3 = load_state(stats, states, at + 3 * stride, (g < G) & (c + 3 < open_slot), D, DIM)
            closed_m, closed_l, closed_acc = merge(closed_m, closed_l, closed_acc, m1, l1, acc1)
            closed_m, closed_l, closed_acc = merge(closed_m, closed_l, closed_acc, m2, l2, acc2)
            closed_m, closed_l, closed_acc = merge(closed_m, closed_l, closed_acc, m3, l3, acc3)

    # Go on from the open chunk, ROWS wide as every fold is; rows after the G heads carry copies that are never stored.
    chunk_m, chunk_l, chunk_acc = load_state(stats, states, (open_slot * N + n) * G + r, started, D, DIM)
    m = tl.reshape(tl.broadcast_to(closed_m[None, :], (ROWS // GROUP, GROUP)), (ROWS,))
    l = tl.reshape(tl.broadcast_to(closed_l[None, :], (ROWS // GROUP, GROUP)), (ROWS,))
    acc = tl.reshape(tl.broadcast_to(closed_acc[None, :, :], (ROWS // GROUP, GROUP, DIM)), (ROWS, DIM))
    visible = ok[:, None] & seen[None, :]
    chunk_m, chunk_l, chunk_acc = fold(query, k, v, visible, chunk_m, chunk_l, chunk_acc, scale, squash, True)
    for begin in range(tail + 64, position + 1, 64):
        if starts_chunk(begin):
            m, l, acc = merge(m, l, acc, chunk_m, chunk_l, chunk_acc)
            chunk_m, chunk_l, chunk_acc = empty_state(ROWS, DIM)
        k, v, seen = _gather(k_cache, v_cache, table, path, begin, length, position, lowest, h, A, HK, D, DIM)
        visible = ok[:, None] & seen[None, :]
        chunk_m, chunk_l, chunk_acc = fold(query, k, v, visible, chunk_m, chunk_l, chunk_acc, scale, squash, True)
    m, l, acc = merge(m, l, acc, chunk_m, chunk_l, chunk_acc)
    result = finish(m, l, acc, sinks, h * G + r, ok).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * D + d[None, :], result, mask=ok[:, None] & (d < D)[None, :])


def tree_attention(q, kv, index, options=EVERYTHING, out=None, late=False):
    """Attention of every node over its path; shapes as in the legend above.

    options: AttentionOptions; out: where to write, on a GPU, contiguous; late: a GPU may run chains beside the kernel before, which
    awaited all that these need. Raises ValueError for unsupported shapes.
    """
    check_attention(q, kv, index.num_kv_heads, options)
    if not on_triton(q):
        return tile_attention(q, kv, index.tiles, options).to(q.dtype)
    return _launch(q, kv, index, options, out, late)


def _launch(
    q, kv, index, options, out=None, late=False,
    walks=None, rows=None, num_stages=None, tensor_map=None, overlap=None, tail_rows=None,
):  # fmt: skip
    """Launch the two passes. Arguments after `late` override the choice made from shapes; every choice gives the same bits."""
    batch, num_nodes, num_heads, dim = q.shape
    hk, table, committed = index.num_kv_heads, index.block_table, index.committed
    num_rows, fitting = num_nodes * (num_heads // hk), block_rows(dim, q.dtype, q.device)
    rows, tail_rows = rows or fitting, tail_rows or fitting
    blocks = hk * triton.cdiv(num_rows, rows)
    walks = blocks * batch >= WALK_PROGRAMS if walks is None else walks
    overlap = can_overlap(q.device) if overlap is None else overlap
    chunks = num_chunks(table.shape[1] * PAGE)
    if walks and index.is_chain:
        late, q, far = late and q.is_contiguous(), q.contiguous(), None  # a copy would stand between
        if chunks > FIRST_FAR:  # beside them the near ones are walked
            far, late = far_states(q, kv, table, committed, hk, options, late), True
        return chain_attention(q, kv, table, committed, hk, options, out, far, late)
    slots = 2 if walks else chunks
    splits = 1 if walks else min(chunks, triton.cdiv(NUM_PROGRAMS, blocks * batch))
    states = torch.empty(batch, hk, slots, num_rows, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch, hk, slots, num_rows, 2, dtype=torch.float32, device=q.device)
    q = q.contiguous()
    if out is None:
        out = empty_rows(batch * num_nodes, num_heads * dim, q.dtype, q.device).view(q.shape)
    k, v = kv.unbind()
    lanes = pad_dim(dim)
    keys, values, tensor_map = tile_sources(k, v, lanes, tensor_map)
    (scale, squash), window = options.factors(dim), options.window
    numbers = dict(scale=scale, squash=squash, window=window or 0, HQ=num_heads, HK=hk, D=dim, DIM=lanes)
    flags = dict(WINDOW=window is not None, WALK=walks, OVERLAP=overlap, enable_fp_fusion=False)
    alone = walks and q.is_cuda and blocks * batch <= num_multiprocessors(q.device)
    stages = num_stages or count_stages(dim, q.dtype, q.device, alone)
    early = {"launch_pdl": True} if overlap else {}
    _prefix_kernel[blocks, batch, splits](
        q, keys, values, table, committed, index.window_depths, stats, states, num_rows, slots, splits,
        table.stride(0), index.depths.stride(0), **numbers, ROWS=rows, TENSOR_MAP=tensor_map,
        num_warps=rows // 16, num_stages=stages, **flags, **({} if walks else early),
    )  # fmt: skip
    _tail_kernel[hk, num_nodes, batch](
        q, k, v, table, committed, index.depths, index.window_depths, index.ancestors, stats, states, options.sinks, out,
        num_nodes, index.ancestors.shape[2], slots,
        table.stride(0), index.depths.stride(0), *index.ancestors.stride()[:2], **numbers,
        GROUP=triton.next_power_of_2(num_heads // hk), ROWS=tail_rows, num_warps=tail_rows // 16, num_stages=1, **flags, **early,
    )  # fmt: skip
    return out.view(q.shape)
