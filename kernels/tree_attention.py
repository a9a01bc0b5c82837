"""Attention of draft-tree nodes over a paged KV cache, adding in the order of absolute positions.

    q [B, N, HQ, D]       queries of N nodes per request, rotated
    kv [2, S * HK, D]     keys and values of one layer; row (page * HK + head) * PAGE + offset, so a page is [HK, PAGE, D]
    index (TreeIndex)     where each request's and each node's keys lie
    ->  [B, N, HQ, D]     softmax(q k^T / sqrt(D)) v over the committed prefix and the node's own ancestors

Keys are taken in tiles of TILE positions aligned to absolute positions. A tile yields (max, sum, accumulator) by one
function for one block shape, ROWS query rows by TILE keys, whether the tile is committed and shared by all nodes (prefix) or
gathered for one node through its ancestors (tail). Tiles are added one after the other in the order of positions, and a
masked tile adds an exact zero. So a node's bits depend on its own path alone: not on the tree, the company, or on what was
committed when (design: docs/lossless.md). Sums are in fp32 (fp64 for fp64 input).

Letters: B requests, N nodes, HQ query heads, HK key heads, G = HQ / HK, D head dimension, L committed length, P tiles of the
longest prefix, T tiles of the longest tail. Not supported: sliding windows, more than ROWS query heads per key head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

PAGE = 64  # positions per page of the cache
TILE = 16  # keys per step of the sum; divides PAGE
ROWS = 16  # query rows per block


@dataclass(frozen=True)
class TreeIndex:
    """Rows of the cache that one forward pass reads. Made once per pass, used by every layer."""

    prefix_rows: torch.Tensor  # [B * P * HK * TILE] rows of the committed tiles below each request's tail
    prefix_bias: torch.Tensor  # [B * P * HK, 1, 1] 0, or -inf where a request has fewer tiles
    tail_rows: torch.Tensor  # [B * N * T * HK * TILE] rows of each node's own tail
    tail_bias: torch.Tensor  # [B * N * T * HK, 1, TILE] 0, or -inf behind the node
    num_prefix_tiles: int  # P
    num_tail_tiles: int  # T


def build_tree_index(block_table, committed, committed_host, depths, ancestors, num_kv_heads, dtype=torch.float32):
    """Where the keys of every node lie.

    block_table [B, pages] page numbers; committed [B] = L, and the same numbers as a host list `committed_host` (they set the
    shapes); depths [N] of the nodes; ancestors [N, max depth + 1] the node at each depth on the way from the root, itself last
    (entries behind it are ignored).
    """
    device = block_table.device
    batch, num_nodes = committed.shape[0], depths.shape[0]
    max_depth = ancestors.shape[1] - 1
    num_prefix = max(length // TILE for length in committed_host)
    num_tail = max((length + max_depth) // TILE - length // TILE + 1 for length in committed_host)
    head = torch.arange(num_kv_heads, device=device)
    within = torch.arange(TILE, device=device)

    # Prefix: whole tiles below the tile that holds position L.
    tile = torch.arange(num_prefix, device=device)
    pages = block_table[:, tile * TILE // PAGE]  # [B, P]
    offset = (tile * TILE % PAGE)[None, :, None, None] + within  # [1, P, 1, TILE]
    prefix_rows = (pages[:, :, None, None] * num_kv_heads + head[:, None]) * PAGE + offset  # [B, P, HK, TILE]
    beyond = tile[None] >= (committed // TILE)[:, None]
    prefix_bias = torch.zeros(batch, num_prefix, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)
    prefix_bias = prefix_bias[:, :, None].expand(-1, -1, num_kv_heads).reshape(-1, 1, 1)

    # Tail: positions from the tile of L to the node itself. Position x < L lies at x, x = L + j at the slot of ancestor j.
    base = committed // TILE * TILE
    position = base[:, None] + torch.arange(num_tail * TILE, device=device)  # [B, T * TILE]
    beyond_root = (position - committed[:, None]).clamp(0, max_depth)  # [B, T * TILE]
    slot = committed[:, None, None] + ancestors[:, beyond_root].transpose(0, 1)  # [B, N, T * TILE]
    slot = torch.where((position < committed[:, None])[:, None], position[:, None], slot)
    visible = position[:, None] <= (committed[:, None] + depths)[:, :, None]  # [B, N, T * TILE]
    slot = torch.where(visible, slot, 0)
    pages = block_table.gather(1, (slot // PAGE).flatten(1)).view_as(slot)
    pages = pages.view(batch, num_nodes, num_tail, 1, TILE)
    offset = (slot % PAGE).view(batch, num_nodes, num_tail, 1, TILE)
    tail_rows = (pages * num_kv_heads + head[:, None]) * PAGE + offset  # [B, N, T, HK, TILE]
    tail_bias = torch.zeros(batch, num_nodes, num_tail * TILE, dtype=dtype, device=device)
    tail_bias = tail_bias.masked_fill_(~visible, -torch.inf).view(batch, num_nodes, num_tail, 1, TILE)
    tail_bias = tail_bias.expand(-1, -1, -1, num_kv_heads, -1).reshape(-1, 1, TILE)
    return TreeIndex(prefix_rows.flatten(), prefix_bias, tail_rows.flatten(), tail_bias, num_prefix, num_tail)


def tree_attention_reference(q, k, v, mask):
    """The formula on dense keys, any dtype.  q [B, N, HQ, D], k and v [B, S, HK, D], mask [B, N, S] -> [B, N, HQ, D]"""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bnhd,bshd->bhns", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return torch.einsum("bhns,bshd->bnhd", scores.softmax(-1), v)


def tree_attention(q, kv, index):
    """Attention of every node over its path; shapes as in the legend above."""
    batch, num_nodes, num_heads, dim = q.shape
    num_tiles = index.num_tail_tiles
    num_kv_heads = index.tail_rows.numel() // (batch * num_nodes * num_tiles * TILE)
    group = num_heads // num_kv_heads
    if group * num_kv_heads != num_heads or group > ROWS:
        raise ValueError(
            f"tree_attention takes up to {ROWS} query heads per key head, got {num_heads} for {num_kv_heads}"
        )
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q = (q.to(wide) * dim**-0.5).view(batch, num_nodes, num_kv_heads, group, dim)

    # Tail: one block of rows per node and key head.
    block = F.pad(q, (0, 0, 0, ROWS - group))[:, :, None].expand(-1, -1, num_tiles, -1, -1, -1)
    keys, values = kv.index_select(1, index.tail_rows).to(wide).view(2, -1, TILE, dim).unbind()
    tail = _fold(block.reshape(-1, ROWS, dim), keys, values, index.tail_bias)
    # -> [tiles, B, N, HK, G, .]
    tail = [x.view(batch, num_nodes, num_tiles, num_kv_heads, ROWS, -1)[..., :group, :].movedim(2, 0) for x in tail]

    if index.num_prefix_tiles:
        prefix = _prefix(q, kv, index, wide)
        highest, total, weighted = (torch.cat(parts) for parts in zip(prefix, tail))
    else:
        highest, total, weighted = (x.contiguous() for x in tail)

    # The tiles are added in the order of positions, one after the other; weight 0 (a masked tile) adds an exact zero.
    scale = torch.exp(highest - highest.amax(0))  # [tiles, B, N, HK, G, 1]
    total, weighted = total * scale, weighted * scale
    total_sum, weighted_sum = total[0], weighted[0]
    for t in range(1, total.shape[0]):
        total_sum = total_sum + total[t]
        weighted_sum = weighted_sum + weighted[t]
    return (weighted_sum / total_sum).reshape(batch, num_nodes, num_heads, dim)


def _prefix(q, kv, index, wide):
    """States of the committed tiles for all nodes.  q [B, N, HK, G, D] -> (max, sum, acc), each [P, B, N, HK, G, .]"""
    batch, num_nodes, num_kv_heads, group, dim = q.shape
    num_tiles = index.num_prefix_tiles
    keys, values = kv.index_select(1, index.prefix_rows).to(wide).view(2, -1, TILE, dim).unbind()
    rows = q.transpose(1, 2).reshape(batch, num_kv_heads, num_nodes * group, dim)
    rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % ROWS))
    states = []
    for block in rows.split(ROWS, 2):
        block = block[:, None].expand(-1, num_tiles, -1, -1, -1).reshape(-1, ROWS, dim)
        state = _fold(block, keys, values, index.prefix_bias)
        states.append([x.view(batch, num_tiles, num_kv_heads, ROWS, -1) for x in state])
    joined = []
    for parts in zip(*states):
        x = torch.cat(parts, 3)[:, :, :, : num_nodes * group]
        x = x.view(batch, num_tiles, num_kv_heads, num_nodes, group, -1)
        joined.append(x.permute(1, 0, 3, 2, 4, 5))
    return joined


def _fold(q, k, v, bias):
    """One tile.  q [X, ROWS, D] scaled, k and v [X, TILE, D], bias [X, 1, TILE or 1] -> max, sum [X, ROWS, 1], acc [X, ROWS, D]"""
    scores = torch.bmm(q, k.transpose(1, 2)) + bias
    highest = scores.amax(-1, keepdim=True)
    # A fully masked tile has max -inf: its weight in the sum is exp(-inf) = 0, and its own terms must not be NaN.
    p = torch.exp(scores - highest.clamp_min(torch.finfo(scores.dtype).min))
    return highest, p.sum(-1, keepdim=True), torch.bmm(p, v)
