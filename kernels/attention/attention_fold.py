"""The sum of attention over keys, in one order for every kernel: by absolute position, whatever else is in the batch.

- A tile is 64 keys at 64 r, 64 r + 1, ...: one page of the cache. `fold` adds a tile to a state (max, sum, accumulator), an
  online softmax with the maximum in units of log2.
- A chunk is a run of tiles: 256 keys below position 2048, 512 keys below 8192, 1024 keys beyond. Within a chunk tiles are folded
  in order from the empty state (-inf, 0, 0). Later chunks are longer: a short context then spreads over many programs,
  and a long one neither leaves many states in memory nor merges often.
- `merge` adds a chunk's state to the sum of the chunks before it, in order, from the empty state.
- A masked tile, an empty state and a query row's neighbours are exact identities.

So tiles, chunks and their order depend on positions alone, and a row's bits are the same whether its keys were committed or still
in the tree, read by one program or by many, for one row or for 128. Two rules keep the arithmetic equal across kernels. Every
fused multiply-add is written out, and every kernel is launched with `enable_fp_fusion=False`: the compiler contracts nothing on
its own. And a warp holds 16 whole rows (64 rows take 4 warps, 128 take 8): `tl.sum` adds the keys of a row in one order.
Measured on an H200: 16, 64 and 128 rows agree in every bit (so mma.sync and wgmma agree); 32 rows on 2 warps, where a row is
spread over both, do not.
"""

from dataclasses import dataclass

import torch

from ..jit import jit, on_triton, tl, triton
from ..overlap import has_tensor_maps
from ..shared_memory import most_stages, shared_memory

PAGE = 64  # positions per page of the cache, and keys per tile
MAX_GROUP = 64  # query heads per key head
MAX_DIM = 256
LOG2_E = 1.4426950408889634
CHUNKS = ((0, 256, 0), (2048, 512, 8), (8192, 1024, 20))  # (from position, keys per chunk, number of its first chunk)
# The first position of the far chunks, and the first far chunk: other programs compute these where one would walk a chain's whole
# context.
FAR, _, FIRST_FAR = CHUNKS[1]


def num_chunks(length):
    """Number of chunks that hold the positions below `length`."""
    if length <= 0:
        return 0
    start, size, first = next(region for region in reversed(CHUNKS) if length - 1 >= region[0])
    return first + (length - 1 - start) // size + 1


@jit
def chunk_at(x):
    """Number of the chunk that holds position x."""
    return tl.where(x < 2048, x // 256, tl.where(x < 8192, 8 + (x - 2048) // 512, 20 + (x - 8192) // 1024))


@jit
def chunk_start(c):
    """First position of chunk c."""
    return tl.where(c < 8, c * 256, tl.where(c < 20, 2048 + (c - 8) * 512, 8192 + (c - 20) * 1024))


@jit
def starts_chunk(x):
    """Whether position x, a multiple of 64, is the first of a chunk."""
    return x % tl.where(x < 2048, 256, tl.where(x < 8192, 512, 1024)) == 0


@jit
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """A state of no keys: maximum [ROWS], sum [ROWS], accumulator [ROWS, DIM]."""
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    return m, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIM), tl.float32)


@jit
def load_state(stats, states, at, ok, D: tl.constexpr, DIM: tl.constexpr):
    """State of rows `at`; the empty state where not ok."""
    d = tl.arange(0, DIM)
    m = tl.load(stats + 2 * at, mask=ok, other=float("-inf"))
    l = tl.load(stats + 2 * at + 1, mask=ok, other=0.0)
    return m, l, tl.load(states + at[:, None] * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)


@jit
def store_state(stats, states, at, ok, m, l, acc, D: tl.constexpr, DIM: tl.constexpr):
    d = tl.arange(0, DIM)
    tl.store(stats + 2 * at, m, mask=ok)
    tl.store(stats + 2 * at + 1, l, mask=ok)
    tl.store(states + at[:, None] * D + d[None, :], acc, mask=ok[:, None] & (d < D)[None, :])


@jit
def fold(q, k, v, visible, m, l, acc, scale, squash, MASKED: tl.constexpr):
    """Add one tile to the state.  q [ROWS, DIM], k and v [64, DIM], visible [ROWS, 64], scale > 0 in units of log2

    squash: None, or with a soft cap the factor of scores inside tanh; scale is that outside then.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if squash is not None:
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (squash * 2.885390081777927)))  # tanh(s * squash)
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    highest = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf is NaN
    p = tl.exp2(tl.fma(s, scale, -base[:, None]))
    shrink = tl.exp2(m - base)
    l = tl.fma(l, shrink, tl.sum(p, 1))
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return highest, l, acc


@jit
def merge(m, l, acc, chunk_m, chunk_l, chunk_acc):
    """Add the state of one more chunk to that of the chunks before it."""
    highest = tl.maximum(m, chunk_m)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    old, new = tl.exp2(m - base), tl.exp2(chunk_m - base)
    return highest, tl.fma(l, old, chunk_l * new), tl.fma(acc, old[:, None], chunk_acc * new[:, None])


@jit
def finish(m, l, acc, sinks, heads, ok):
    """The weighted mean of the values.  acc [ROWS, DIM] -> [ROWS, DIM]; sinks [HQ] or None, heads [ROWS] of the rows that are ok"""
    if sinks is not None:
        # A sink is one more score, without a value. It comes last, wherever the keys were added.
        sink = tl.load(sinks + heads, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(m, sink)
        shrink = tl.exp2(m - highest)
        l = tl.fma(l, shrink, tl.exp2(sink - highest))
        acc = acc * shrink[:, None]
    return acc / l[:, None]


@jit
def load_tile(cache, page, h, HK: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, TENSOR_MAP: tl.constexpr):
    """Keys or values [64, DIM] of head h in a page; lanes after D are zero.  cache: pointer, or tensor map of [rows, D]"""
    if TENSOR_MAP:
        tile = cache.load([((page * HK + h) * 64).to(tl.int32), 0])
    else:
        x, d = tl.arange(0, 64), tl.arange(0, DIM)
        at = cache + (page * HK + h) * 64 * D + x[:, None] * D + d[None, :]
        if D == DIM:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(d < D)[None, :], other=0.0)
    return tile


@jit
def load_rows(cache, rows, visible, D: tl.constexpr, DIM: tl.constexpr, CACHE: tl.constexpr):
    """Keys, values or queries [rows, DIM] of the given rows; zeros where not visible, whatever lies there."""
    d = tl.arange(0, DIM)
    at = cache + rows[:, None] * D + d[None, :]
    return tl.load(at, mask=visible[:, None] & (d < D)[None, :], other=0.0, cache_modifier=CACHE)


@jit
def page_at(table, tile, end):
    """Number of a tile's page; 0 from tile `end` on. Past the L1: a kernel may ask before it awaits the one before (overlap.py)."""
    return tl.load(table + tile, mask=tile < end, other=0, cache_modifier=".cg").to(tl.int64)


@jit
def walk(
    q,
    k_cache,
    v_cache,
    table,
    page,
    h,
    first,
    last,
    lowest,
    m,
    l,
    acc,
    chunk_m,
    chunk_l,
    chunk_acc,
    scale,
    squash,
    HK: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    TENSOR_MAP: tl.constexpr,
):
    """Add the tiles first .. last - 1. Rows see all of their keys, except those below the window's lower edge `lowest` [ROWS].

    Takes and returns two states: the closed chunks' (m, l, acc) and the open chunk's. A chunk is closed when the next one begins.
    page: number of the first tile's page (`page_at`).
    """
    # The next page number is read one step ahead: read in the step itself, it would take a stage of the loads' pipeline.
    for t in range(first, last):
        if starts_chunk(t * 64):
            m, l, acc = merge(m, l, acc, chunk_m, chunk_l, chunk_acc)
            chunk_m, chunk_l, chunk_acc = empty_state(ROWS, DIM)
        k = load_tile(k_cache, page, h, HK, D, DIM, TENSOR_MAP)
        v = load_tile(v_cache, page, h, HK, D, DIM, TENSOR_MAP)
        page = page_at(table, t + 1, last)
        visible = (t * 64 + tl.arange(0, 64))[None, :] >= lowest[:, None]
        chunk_m, chunk_l, chunk_acc = fold(q, k, v, visible, chunk_m, chunk_l, chunk_acc, scale, squash, WINDOW)
    return m, l, acc, chunk_m, chunk_l, chunk_acc


@jit
def fold_chunk(
    q, k_cache, v_cache, table, page, h, begin, end, lowest, scale, squash,
    HK: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr, TENSOR_MAP: tl.constexpr,
):  # fmt: skip
    """The state of the tiles begin .. end - 1, of one chunk, at least one; the other arguments are those of `walk`."""
    m, l, acc = empty_state(ROWS, DIM)
    for t in range(begin, end):
        k = load_tile(k_cache, page, h, HK, D, DIM, TENSOR_MAP)
        v = load_tile(v_cache, page, h, HK, D, DIM, TENSOR_MAP)
        page = page_at(table, t + 1, end)
        visible = (t * 64 + tl.arange(0, 64))[None, :] >= lowest[:, None]
        m, l, acc = fold(q, k, v, visible, m, l, acc, scale, squash, WINDOW)
    return m, l, acc


def pad_dim(dim):
    """Lanes that hold a head: a power of two, at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(dim))


def _shared_bytes(dim, dtype):
    """Bytes of shared memory: of a tile of keys and values, of 64 queries and their scores."""
    lanes = pad_dim(dim)
    return 2 * PAGE * lanes * dtype.itemsize, 64 * (lanes + PAGE) * dtype.itemsize


def block_rows(dim, dtype, device):
    """Rows of a block of queries, the same in all kernels of a device: 64, or 16 where float32 leaves no room for 64.

    In 16 bits a tile that is alone in flight is loaded in turns, keys and then values: that fits everywhere. Bits of one device are
    compared with its own only (numerics.py names the device).
    """
    return 16 if dtype.itemsize > 2 and sum(_shared_bytes(dim, dtype)) > shared_memory(device).size else 64


def count_stages(dim, dtype, device, alone=False):
    """Tiles in flight: as many as leave room for a second block of 64 queries on a multiprocessor (for wide heads: for one).

    alone: there are no more programs than multiprocessors; then one more tile is in flight. Measured on an H200; on other GPUs as
    many of these as fit.
    """
    if dtype.itemsize > 2:
        stages = 2 if dim <= 64 else 1
    else:
        stages = 3 + alone if dim <= 128 else 2
    return max(1, min(stages, most_stages(shared_memory(device), *_shared_bytes(dim, dtype))))


def tile_sources(k, v, lanes, tensor_map=None):
    """(keys, values, whether they are tensor maps) to load tiles [64, lanes] from, of keys and values [rows, D] of one layer.

    Tensor maps where the device has them and rows are whole multiples of 16 bytes: the same values, by the copy engine. It brings
    keys and values to shared memory, so both must fit there.
    """
    if tensor_map is None:
        tensor_map = has_tensor_maps(k.device) and k.shape[1] * k.itemsize % 16 == 0 and k.data_ptr() % 16 == 0
        tensor_map = tensor_map and _shared_bytes(lanes, k.dtype)[0] <= shared_memory(k.device).size
    if not tensor_map:
        return k, v, False
    from triton.tools.tensor_descriptor import TensorDescriptor

    return *(TensorDescriptor.from_tensor(x, [PAGE, lanes]) for x in (k, v)), True


@dataclass(frozen=True)
class AttentionOptions:
    """What attention does to the scores.

    scale: their factor, above 0 (None: 1 / sqrt(D)); window: positions that a row sees, its own the last (None: all); softcap: c of
    c tanh(score / c), or None; sinks [HQ]: a score for each head that takes part in the softmax and has no value, or None.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def factors(self, dim):
        """(scale, squash) of `fold`, for heads of so many dimensions."""
        scale = dim**-0.5 if self.scale is None else self.scale
        return (scale * LOG2_E, None) if self.softcap is None else (self.softcap * LOG2_E, scale / self.softcap)


EVERYTHING = AttentionOptions()  # 1 / sqrt(D), all positions


def check_attention(q, kv, num_kv_heads, options):
    """ValueError for what the kernels do not take.  q [..., HQ, D], kv [2, rows, D]"""
    num_heads, dim = q.shape[-2:]
    if num_heads % num_kv_heads or num_heads > MAX_GROUP * num_kv_heads:
        raise ValueError(
            f"attention takes up to {MAX_GROUP} query heads per key head, got {num_heads} for {num_kv_heads}"
        )
    if dim > MAX_DIM:
        raise ValueError(f"attention takes heads of up to {MAX_DIM} dimensions, got {dim}")
    if kv.shape[0] != 2 or kv.shape[2] != dim or kv.dtype != q.dtype or not kv.is_contiguous():
        raise ValueError(f"attention takes kv [2, rows, {dim}] in {q.dtype}, got {list(kv.shape)} in {kv.dtype}")
    scale, window, softcap, sinks = options.scale, options.window, options.softcap, options.sinks
    if (
        (scale is not None and scale <= 0)
        or (window is not None and window < 1)
        or (softcap is not None and softcap <= 0)
    ):
        raise ValueError(
            f"attention takes a scale and a soft cap above 0 and a window of 1 or more, got {scale}, {softcap} and {window}"
        )
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"attention takes a sink for each of {num_heads} heads, got {list(sinks.shape)}")
    if on_triton(q) and num_heads > block_rows(dim, q.dtype, q.device) * num_kv_heads:
        raise ValueError(
            f"{num_heads // num_kv_heads} query heads per key head of {dim} dimensions do not fit in {q.dtype}"
        )
    if on_triton(q) and q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"attention on a GPU takes float32, bfloat16 or float16, got {q.dtype}")
