"""Tree attention on the CPU: tiles of TILE keys by blocks of ROWS query rows, added in the order of positions.

One function computes (max, sum, accumulator) of every tile, for one block shape: ROWS query rows by TILE keys. It serves tiles
that are committed and shared by all nodes (prefix) and tiles gathered for one node through its ancestors (tail). Tiles are
added one after the other in the order of positions, and a masked tile adds an exact zero. So a node's bits depend on its own
path alone: not on the tree, on other requests, or on when keys were committed. Both products are zero-padded to a width that is
a multiple of FEATURES (linear.py): at other widths the library's sums depend on the row's place. Sums are in fp32 (fp64 for fp64).

Letters as in tree_attention.py; here P tiles of the longest prefix, T tiles of the longest tail.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..linear.linear import FEATURES
from .attention_fold import PAGE

TILE = 16  # keys per step of the sum; divides PAGE
ROWS = 16  # query rows per block


@dataclass(frozen=True)
class TileRows:
    """Rows of the cache that one forward pass reads. Made once per pass, used by every layer."""

    prefix_rows: torch.Tensor  # [B * P * HK * TILE] rows of the committed tiles below each request's tail
    prefix_bias: torch.Tensor  # [B * P * HK, 1, 1] 0, or -inf where a request has fewer tiles
    tail_rows: torch.Tensor  # [B * N * T * HK * TILE] rows of each node's own tail
    tail_bias: torch.Tensor  # [B * N * T * HK, 1, TILE] 0, or -inf after the node
    tail_positions: torch.Tensor  # [B, T * TILE] positions of the tail's keys
    node_positions: torch.Tensor  # [B, N]
    num_kv_heads: int  # HK
    num_prefix_tiles: int  # P
    num_tail_tiles: int  # T


def build_tile_rows(block_table, committed, depths, ancestors, num_kv_heads, dtype):
    """Index where the keys of every node lie.  block_table [B, pages], committed [B], depths [B, N], ancestors [B, N, A]"""
    device = block_table.device
    batch, num_nodes, num_depths = ancestors.shape
    max_depth = num_depths - 1
    lengths = committed.tolist()  # they set the shapes
    num_prefix = max(length // TILE for length in lengths)
    num_tail = max((length + max_depth) // TILE - length // TILE + 1 for length in lengths)
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

    # Tail: positions from the tile of L to the node itself. Position x < L lies at x, x = L + j at the place of ancestor j.
    base = committed // TILE * TILE
    position = base[:, None] + torch.arange(num_tail * TILE, device=device)  # [B, T * TILE]
    beyond_root = (position - committed[:, None]).clamp(0, max_depth)  # [B, T * TILE]
    place = committed[:, None, None] + ancestors.gather(2, beyond_root[:, None].expand(-1, num_nodes, -1))
    place = torch.where((position < committed[:, None])[:, None], position[:, None], place)  # [B, N, T * TILE]
    node_positions = committed[:, None] + depths
    visible = position[:, None] <= node_positions[:, :, None]  # [B, N, T * TILE]
    place = torch.where(visible, place, 0)
    pages = block_table.gather(1, (place // PAGE).flatten(1)).view_as(place)
    pages = pages.view(batch, num_nodes, num_tail, 1, TILE)
    offset = (place % PAGE).view(batch, num_nodes, num_tail, 1, TILE)
    tail_rows = (pages * num_kv_heads + head[:, None]) * PAGE + offset  # [B, N, T, HK, TILE]
    tail_bias = torch.zeros(batch, num_nodes, num_tail * TILE, dtype=dtype, device=device)
    tail_bias = _spread_over_heads(tail_bias.masked_fill_(~visible, -torch.inf), num_tail, num_kv_heads)
    return TileRows(
        prefix_rows.flatten(),
        prefix_bias,
        tail_rows.flatten(),
        tail_bias,
        position,
        node_positions,
        num_kv_heads,
        num_prefix,
        num_tail,
    )


def tile_attention(q, kv, rows, scale, window):
    """q [B, N, HQ, D], kv [2, rows, D], rows a TileRows -> [B, N, HQ, D] in fp32 (fp64)"""
    batch, num_nodes, num_heads, dim = q.shape
    num_kv_heads, num_tiles = rows.num_kv_heads, rows.num_tail_tiles
    group = num_heads // num_kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q = (q.to(wide) * scale).view(batch, num_nodes, num_kv_heads, group, dim)
    lowest = None if window is None else rows.node_positions - window + 1  # [B, N] first position that a node sees

    # Tail: one block of rows per node and key head.
    block = F.pad(q, (0, 0, 0, ROWS - group))[:, :, None].expand(-1, -1, num_tiles, -1, -1, -1)
    keys, values = kv.index_select(1, rows.tail_rows).to(wide).view(2, -1, TILE, dim).unbind()
    bias = rows.tail_bias
    if lowest is not None:
        below = rows.tail_positions[:, None] < lowest[:, :, None]  # [B, N, T * TILE]
        bias = bias.masked_fill(_spread_over_heads(below, num_tiles, num_kv_heads), -torch.inf)
    tail = _fold(block.reshape(-1, ROWS, dim), keys, values, bias)
    # -> [tiles, B, N, HK, G, .]
    tail = [x.view(batch, num_nodes, num_tiles, num_kv_heads, ROWS, -1)[..., :group, :].movedim(2, 0) for x in tail]

    if rows.num_prefix_tiles:
        prefix = _prefix(q, kv, rows, wide, lowest)
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


def _prefix(q, kv, rows, wide, lowest):
    """States of the committed tiles for all nodes.  q [B, N, HK, G, D] -> (max, sum, acc), each [P, B, N, HK, G, .]"""
    batch, num_nodes, num_kv_heads, group, dim = q.shape
    num_tiles = rows.num_prefix_tiles
    keys, values = kv.index_select(1, rows.prefix_rows).to(wide).view(2, -1, TILE, dim).unbind()
    queries = q.transpose(1, 2).reshape(batch, num_kv_heads, num_nodes * group, dim)
    padding = -queries.shape[2] % ROWS
    blocks = F.pad(queries, (0, 0, 0, padding)).split(ROWS, 2)
    biases = [rows.prefix_bias] * len(blocks)
    if lowest is not None:
        position = torch.arange(num_tiles * TILE, device=q.device).view(num_tiles, 1, 1, TILE)
        lowest = F.pad(lowest.repeat_interleave(group, 1), (0, padding))[:, None, None, :, None]  # [B, 1, 1, rows, 1]
        below = (position < lowest).expand(-1, -1, num_kv_heads, -1, -1).flatten(0, 2)  # [B * P * HK, rows, TILE]
        biases = [rows.prefix_bias.masked_fill(part, -torch.inf) for part in below.split(ROWS, 1)]
    states = []
    for block, bias in zip(blocks, biases):
        block = block[:, None].expand(-1, num_tiles, -1, -1, -1).reshape(-1, ROWS, dim)
        state = _fold(block, keys, values, bias)
        states.append([x.view(batch, num_tiles, num_kv_heads, ROWS, -1) for x in state])
    joined = []
    for parts in zip(*states):
        x = torch.cat(parts, 3)[:, :, :, : num_nodes * group]
        x = x.view(batch, num_tiles, num_kv_heads, num_nodes, group, -1)
        joined.append(x.permute(1, 0, 3, 2, 4, 5))
    return joined


def _fold(q, k, v, bias):
    """One tile.  q [X, ROWS, D] scaled, k and v [X, TILE, D], bias -> max, sum [X, ROWS, 1], acc [X, ROWS, D]"""
    keys, dim = v.shape[1:]
    multiple = FEATURES[v.dtype]
    if keys % multiple:
        k = F.pad(k, (0, 0, 0, -keys % multiple))
    if dim % multiple:
        v = F.pad(v, (0, -dim % multiple))
    scores = torch.bmm(q, k.transpose(1, 2))[..., :keys] + bias
    highest = scores.amax(-1, keepdim=True)
    # A fully masked tile has max -inf: its weight in the sum is exp(-inf) = 0, and its own terms must not be NaN.
    p = torch.exp(scores - highest.clamp_min(torch.finfo(scores.dtype).min))
    if v.dtype == torch.float64:  # threads that share a tile's columns would cut them elsewhere than at a multiple
        acc = torch.cat([torch.bmm(p, part.contiguous()) for part in v.split(multiple, 2)], 2)
    else:
        acc = torch.bmm(p, v)
    return highest, p.sum(-1, keepdim=True), acc[..., :dim]


def _spread_over_heads(x, num_tiles, num_kv_heads):
    """[B, N, T * TILE] -> [B * N * T * HK, 1, TILE]"""
    x = x.view(*x.shape[:2], num_tiles, 1, TILE)
    return x.expand(-1, -1, -1, num_kv_heads, -1).reshape(-1, 1, TILE)
