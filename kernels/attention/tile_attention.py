"""Tree attention on the CPU: tiles of TILE keys by blocks of ROWS query rows, added in the order of positions.

One function computes (max, sum, accumulator) of every tile, for one block shape: ROWS query rows by TILE keys. A block holds the
rows of a few nodes. It meets the tiles that are committed and shared by all nodes (prefix), and for each of its nodes the tiles
gathered through that node's ancestors (tail), of which only the node's own rows are used. Tiles are added one after the other in
the order of positions, and a masked tile adds an exact zero. So a node's bits depend on its own path alone: not on the tree, on
other requests, or on when keys were committed. Both products are zero-padded to a width that is a multiple of FEATURES (linear.py):
at other widths the library's sums depend on the row's place. Sums are in fp32 (fp64 for fp64 input).

Letters as in tree_attention.py; here n nodes of a block, C blocks, P tiles of the longest prefix, T of the longest tail, X tiles of
a block: P + n T, of a chain P + T.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..linear.linear import FEATURES
from .attention_fold import PAGE

TILE = 16  # keys per step of the sum; divides PAGE
ROWS = 16  # query rows per block
MANY_ROWS = 64  # where a key head has more query heads
MASKED = (
    -torch.inf
)  # added to the score of a masked key (exp of a large finite number underflows, which takes three times as long)
LOWEST = -1e38  # highest score of a tile without a visible key: all its weights are 0, none is NaN


@dataclass(frozen=True)
class NodeBlocks:
    """Nodes in blocks of query rows, and where their keys lie. The last node stands for those that the last block lacks."""

    num_nodes: int  # n nodes of a block; C = B times the number of blocks
    num_shared_tiles: int  # of the X tiles; the others are each node's own
    rows: torch.Tensor  # [C * X * HK * TILE] rows of the cache: the shared tiles, then each node's own
    bias: torch.Tensor  # [C, X, 1, n G or 1, TILE] 0, or MASKED where a request has fewer tiles and after the node
    positions: torch.Tensor  # [C, X, 1, 1, TILE] of the keys
    window_positions: torch.Tensor  # [C, 1, 1, n G, 1] that the windows of the query rows count from


@dataclass
class TileRows:
    """Rows of the cache that one forward pass reads. Made once per pass, used by every layer."""

    prefix: (
        tuple  # rows of head 0, masked, positions of the committed tiles below each request's tail: three [B, P * TILE]
    )
    tail: tuple  # the same of each node's own tail: three [B, N, T * TILE]
    node_positions: torch.Tensor  # [B, N]
    window_positions: torch.Tensor  # [B, N] that the nodes' windows count from
    is_chain: bool
    num_kv_heads: int  # HK
    dtype: torch.dtype  # of the sums
    _blocks: dict = field(default_factory=dict)

    def blocks(self, group):
        """The NodeBlocks for `group` = HQ / HK query heads per key head."""
        if group not in self._blocks:
            self._blocks[group] = self._make_blocks(group)
        return self._blocks[group]

    def _make_blocks(self, group):
        batch, num_nodes = self.node_positions.shape
        width = min(rows_of_block(group) // group, num_nodes)
        nodes = torch.arange(-(-num_nodes // width) * width, device=self.node_positions.device).clamp_(
            max=num_nodes - 1
        )
        # The last node of a chain's block sees the keys of the others: they share its tail, each masked after its own position.
        shared = self.is_chain or width == 1
        seen = nodes[width - 1 :: width] if shared else nodes
        num_blocks = len(nodes) // width

        def joined(prefix, tail):
            """[B, P * TILE], [B, N, T * TILE] -> [C, X, 1, 1, TILE]"""
            prefix = prefix[:, None].expand(-1, num_blocks, -1)
            return torch.cat((prefix, tail[:, seen].view(batch, num_blocks, -1)), 2).view(
                batch * num_blocks, -1, 1, 1, TILE
            )

        rows, masked, positions = map(joined, self.prefix, self.tail)
        row_positions, window_positions = (
            positions[:, nodes].view(-1, 1, 1, width, 1).repeat_interleave(group, 3)
            for positions in (self.node_positions, self.window_positions)
        )
        if shared and width > 1:
            masked = masked | (positions > row_positions)
        head = torch.arange(0, self.num_kv_heads * PAGE, PAGE, device=rows.device)
        return NodeBlocks(
            num_nodes=width,
            num_shared_tiles=rows.shape[1] if shared else self.prefix[0].shape[1] // TILE,
            rows=(rows + head[:, None, None]).flatten(),
            bias=torch.zeros(masked.shape, dtype=self.dtype, device=rows.device).masked_fill_(masked, MASKED),
            positions=positions,
            window_positions=window_positions,
        )


def build_tile_rows(block_table, committed, depths, window_depths, ancestors, num_kv_heads, dtype):
    """Index where the keys of every node lie.

    block_table [B, pages], committed [B], depths and window_depths [B, N], ancestors [B, N, A]; dtype: of the model; sums are in
    fp32 at least.
    """
    device = block_table.device
    batch, num_nodes, num_depths = ancestors.shape
    max_depth = num_depths - 1
    lengths = committed.tolist()  # they set the shapes
    num_prefix = max(length // TILE for length in lengths)
    num_tail = max((length + max_depth) // TILE - length // TILE + 1 for length in lengths)
    page_rows = num_kv_heads * PAGE

    # Prefix: whole tiles below the tile that holds position L.
    position = torch.arange(num_prefix * TILE, device=device)
    base = (committed // TILE * TILE)[:, None]
    rows = block_table[:, position // PAGE] * page_rows + position % PAGE
    position = position.expand(batch, -1)  # [B, P * TILE]
    prefix = rows, position >= base, position

    # Tail: positions from the tile of L to the node itself. Position x < L lies at x, x = L + j at the place of ancestor j.
    position = base + torch.arange(num_tail * TILE, device=device)  # [B, T * TILE]
    committed = committed[:, None]
    node_positions = committed + depths
    beyond_root = (position - committed).clamp(0, max_depth)
    place = committed[:, None] + ancestors.gather(2, beyond_root[:, None].expand(-1, num_nodes, -1))
    place = torch.where((position < committed)[:, None], position[:, None], place)  # [B, N, T * TILE]
    masked = position[:, None] > node_positions[:, :, None]
    place = place.masked_fill(masked, 0)
    rows = block_table.gather(1, (place // PAGE).flatten(1)).view_as(place) * page_rows + place % PAGE
    tail = rows, masked, position[:, None].expand_as(place)
    # A tree as deep as it has nodes is a chain, unless it grew in this step and has empty nodes.
    is_chain = num_nodes == num_depths and bool((depths[:, 1:] > depths[:, :-1]).all())
    wide = torch.promote_types(dtype, torch.float32)
    return TileRows(prefix, tail, node_positions, committed + window_depths, is_chain, num_kv_heads, wide)


def rows_of_block(group):
    """Query rows of a block, for so many query heads per key head: they alone decide it."""
    return ROWS if group <= ROWS else MANY_ROWS


def tile_attention(q, kv, rows, options):
    """q [B, N, HQ, D], kv [2, rows, D], rows a TileRows, options AttentionOptions -> [B, N, HQ, D] in fp32 (fp64)"""
    batch, num_nodes, num_heads, dim = q.shape
    hk, group = rows.num_kv_heads, num_heads // rows.num_kv_heads
    blocks = rows.blocks(group)
    width, (num_blocks, num_tiles) = blocks.num_nodes, blocks.bias.shape[:2]
    num_rows = width * group
    keys, values = kv.index_select(1, blocks.rows).to(rows.dtype).view(2, -1, TILE, dim).unbind()
    bias = blocks.bias
    if options.window is not None:
        bias = bias.masked_fill(blocks.positions <= blocks.window_positions - options.window, MASKED)
    q = q.to(rows.dtype) * (dim**-0.5 if options.scale is None else options.scale)
    if num_blocks * width > batch * num_nodes:
        q = F.pad(q, (0, 0, 0, 0, 0, num_blocks // batch * width - num_nodes))
    queries = q.view(num_blocks, width, hk, group, dim).transpose(1, 2).reshape(num_blocks, 1, hk, 1, num_rows, dim)
    # The rows are repeated until the block is full, or zeros fill it.
    block = rows_of_block(group)
    if block % num_rows:
        queries = F.pad(queries, (0, 0, 0, block - num_rows))
    queries = queries.expand(-1, num_tiles, -1, block // queries.shape[4], -1, -1).reshape(-1, block, dim)
    states = torch.cat(_fold(queries, keys, values, bias, num_rows, options.softcap), -1)
    states = states.view(num_blocks, num_tiles, hk, num_rows, dim + 2)
    shared = blocks.num_shared_tiles
    if shared < num_tiles:
        # Of its own tiles a node takes its own rows.  -> [C, P + T, HK, n G, D + 2]
        tail = states[:, shared:].unflatten(3, (width, group)).unflatten(1, (width, -1))
        tail = tail.diagonal(0, 1, 4).movedim(-1, 3).flatten(3, 4)
        states = torch.cat((states[:, :shared], tail), 1)
    # The tiles are added in the order of positions, one after the other; weight 0 (a masked tile) adds an exact zero.
    highest, sinks = states[..., -1:], None
    most = highest.amax(1, keepdim=True)
    if options.sinks is not None:  # one more score, without a value: it is added last
        sinks = options.sinks.to(rows.dtype).view(hk, 1, group, 1).expand(-1, width, -1, -1).reshape(hk, num_rows, 1)
        most = most.maximum(sinks)
    first, *others = (states[..., :-1] * torch.exp(highest - most)).unbind(1)
    for tile in others:
        first += tile
    if sinks is not None:
        first[..., -1:] += torch.exp(sinks - most[:, 0])
    found = (first[..., :-1] / first[..., -1:]).view(num_blocks, hk, width, group, dim).transpose(1, 2)
    return found.reshape(batch, -1, num_heads, dim)[:, :num_nodes].contiguous()


def _fold(q, k, v, bias=None, num_rows=ROWS, softcap=None):
    """One tile.  q [X, ROWS, D] scaled, k and v [X, TILE, D] -> weighted sum of the values, sum of the weights, highest score

    bias [C, tiles, 1, R or 1, TILE] or None, with X = C times tiles times HK; num_rows: R rows that are wanted, the first ones. The
    results are [X, R, D], [X, R, 1], [X, R, 1].
    """
    keys, dim = v.shape[1:]
    multiple = FEATURES[v.dtype]
    if keys % multiple:
        k = F.pad(k, (0, 0, 0, -keys % multiple))
    scores = torch.bmm(q, k.transpose(1, 2))[..., :keys].contiguous()
    if softcap is not None:  # softcap * tanh(scores / softcap); the library's tanh depends on an element's place
        scores = softcap - 2 * softcap / (1 + torch.exp(scores * (2 / softcap)))
    wanted = scores[:, :num_rows]
    if bias is not None:
        wanted.view(*bias.shape[:2], -1, num_rows, TILE).add_(bias)
    highest = wanted.amax(-1, keepdim=True).clamp_(min=LOWEST)
    wanted.sub_(highest).exp_()
    if dim % multiple:
        v = F.pad(v, (0, -dim % multiple))
    # The other rows still hold scores. They reach no wanted row.
    if v.dtype == torch.float64:  # threads that share a tile's columns would cut them elsewhere than at a multiple
        weighted = torch.cat([torch.bmm(scores, part.contiguous()) for part in v.split(multiple, 2)], 2)
    else:
        weighted = torch.bmm(scores, v)
    return weighted[:, :num_rows, :dim], wanted.sum(-1, keepdim=True), highest
