"""Row-invariant linear layer: y = x W^T + b, where row r of y is the same bits whatever the other rows are.

    x [M, K], w [N, K], b [N] or None  ->  y [M, N], or its partial sums over S ranges of K: parts [S, M, N]

A library matmul picks its kernel, and with it the order of its sums, by M: one row alone and the same row among sixteen
differ in the last bits. On a GPU the order is fixed by (N, K) alone (linear_table.py): K is cut into S ranges. Tensor cores sum
each range from its start to its end, 16 deep at a time, and the ranges are added in order. The tiles vary with M and change no
bit: a tile's shape is not part of any sum. Two kernels keep that order. `_decode` has the weights as the left operand and the rows
as the right one, so up to 128 rows read the weights once. `_prefill` (linear_prefill.py) has tensor maps and large tiles. float32
multiplies exactly (no TF32).

On the CPU rows are zero-padded to blocks of BLOCK_ROWS, and every block takes the same path, so a row's bits do not depend on its
place or on the other rows. Several blocks are one call where a probe, once per shape, found the bits of single blocks. The product
is oneDNN's where it has the dtype, with the weights in its own layout if `pack_weight` made one (the bits are the same), else the
library's; features are then zero-padded to a multiple of FEATURES, too. Not supported: other ranks than 2 for x.
"""

import functools

import torch
import torch.nn.functional as F

from ..jit import jit, on_triton, tl, triton
from ..overlap import await_previous, overlap, release_next
from ..shared_memory import shared_memory
from .linear_handover import handover_product
from .linear_prefill import TensorDescriptor, maps_fit, num_multiprocessors, prefill_linear
from .linear_table import (
    DECODE_ROWS,
    decode_launch,
    fit_decode,
    halves_of_tile,
    num_splits,
    prefill_launch,
    split_depth,
    tile_rows,
)

# All products of a 7.5 M model, one core with AVX-512, float32 / bfloat16: a bare row of F.linear 4.3 / 3.3 ms. A block of 16 by
# F.linear 9.0 / 4.7 ms; by oneDNN with its own layout 4.6 / 2.9 ms, of 8 3.7 / 1.9, of 4 3.2 / 1.8, 64 rows in one call 11.8 / 6.4.
BLOCK_ROWS = 4
MOST_ROWS = 64  # in one call
# MKL computes features that fill no vector (the last of a product, or of a thread's share of it) by another kernel. Its sums
# depend on the row's place in the block and on the alignment of x. No multiple of these has such a rest, with 1, 2 or 4 threads
# on an AMD CPU with AVX-512; in float64, multiples of 16 that are none of 24 have. bfloat16 and float16 take another library.
FEATURES = {torch.float32: 16, torch.float64: 24}


def linear_reference(x, w, b=None):
    """The formula on the library's product, any dtype; not row-invariant.  [M, K], [N, K] -> [M, N]"""
    return F.linear(x, w, b)


@jit
def sum_parts(parts, offsets, stride, mask, S: tl.constexpr, DTYPE: tl.constexpr):
    """The S parts at `offsets` (element offsets into part 0; parts are `stride` apart), added in order, as DTYPE."""
    total = tl.load(parts + offsets, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, S):
        parts += stride
        total += tl.load(parts + offsets, mask=mask, other=0.0)
    return total.to(DTYPE)


@jit
def range_product(
    x, w, rows, features, row_mask, feature_mask, start, K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Sums over the range of K from `start`, by pointers and masks, so for any shape and dtype.  -> [features, rows] in float32

    float32 has no tensor cores that would sum 16 products at once. Its sums are made of runs of 64 products instead, which keeps
    the error at the library's. The depth of a float32 tile is the same in all launches.
    """
    RUN: tl.constexpr = 64 if x.dtype.element_ty == tl.float32 else SPLIT
    total = tl.zeros((features.shape[0], rows.shape[0]), tl.float32)
    depths = start + tl.arange(0, BLOCK_K)
    w_tile = w + features.to(tl.int64)[:, None] * K + depths[None, :]
    x_tile = x + rows.to(tl.int64)[None, :] * K + depths[:, None]
    for run in range(0, SPLIT, RUN):
        acc = tl.zeros((features.shape[0], rows.shape[0]), tl.float32)
        for k in range(run, run + RUN, BLOCK_K):
            inside = (k + depths < K) & (k + tl.arange(0, BLOCK_K) < SPLIT)
            w_mask = feature_mask[:, None] & inside[None, :]
            weights = tl.load(w_tile + k, mask=w_mask, other=0.0, eviction_policy="evict_first")
            values = tl.load(x_tile + k, mask=row_mask[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(weights, values, acc, input_precision="ieee")
        total += acc
    return total


@jit
def _store_tile(acc, b, out, num_rows, row, features, part, N: tl.constexpr, BLOCK_M: tl.constexpr):
    """acc [BLOCK_N, BLOCK_M], and in the first range the bias, to the rows from `row` of out [S, M, N]"""
    if b is not None:  # noqa: SIM102 (a condition of the compiler's, then one of the program's)
        if part == 0:
            acc += tl.load(b + features, mask=features < N, other=0.0).to(tl.float32)[:, None]
    rows = row + tl.arange(0, BLOCK_M)
    place = (part.to(tl.int64) * num_rows + rows)[None, :] * N + features[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(rows < num_rows)[None, :] & (features < N)[:, None])


@jit(do_not_specialize=["num_rows"])
def _decode(
    x, more_x, w, b, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MAPS: tl.constexpr, LATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_M + MORE_M] of one range of K.  x [M, K], w [N, K], b [N] or None -> out [S, M, N]

    x and w are tensor maps with MAPS, else pointers; more_x: x in tiles of MORE_M rows (0: none); LATE: see linear_sums.
    """
    row = tl.program_id(0) * (BLOCK_M + MORE_M)
    feature = tl.program_id(1) * BLOCK_N
    part = tl.program_id(2)
    features = feature + tl.arange(0, BLOCK_N)
    if not LATE:
        await_previous(OVERLAP)
    if MAPS:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if MORE_M:
            more = tl.zeros((BLOCK_N, MORE_M), tl.float32)
            for k in range(part * SPLIT, part * SPLIT + SPLIT, BLOCK_K):
                weights = w.load([feature, k])
                acc = tl.dot(weights, x.load([row, k]).T, acc)
                more = tl.dot(weights, more_x.load([row + BLOCK_M, k]).T, more)
        else:
            for k in range(part * SPLIT, part * SPLIT + SPLIT, BLOCK_K):
                acc = tl.dot(w.load([feature, k]), x.load([row, k]).T, acc)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        acc = range_product(x, w, rows, features, rows < num_rows, features < N, part * SPLIT, K, SPLIT, BLOCK_K)
    release_next(OVERLAP)
    _store_tile(acc, b, out, num_rows, row, features, part, N, BLOCK_M)
    if MORE_M:
        _store_tile(more, b, out, num_rows, row + BLOCK_M, features, part, N, MORE_M)
    if LATE:
        await_previous(OVERLAP)


@jit
def _sum(parts, out, count, S: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """parts [S, count] -> out [count]"""
    await_previous(OVERLAP)
    release_next(OVERLAP)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    tl.store(out + offsets, sum_parts(parts, offsets, count, mask, S, out.dtype.element_ty), mask=mask)


def check_product(name, x, w, b):
    """Raises ValueError if x [M, K], w [N, K] and b [N] do not fit each other."""
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{name} takes x [M, K] and w [N, K], got {tuple(x.shape)} and {tuple(w.shape)}")
    if b is not None and b.shape != w.shape[:1]:
        raise ValueError(f"{name} takes b [N] with w [N, K], got {tuple(b.shape)} and {tuple(w.shape)}")


def check_kernel_operands(name, x, w, b):
    """Raises ValueError for what the GPU kernels do not take: mixed dtypes, weights that are not contiguous."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or w.dtype != x.dtype:
        raise ValueError(f"{name} takes bfloat16, float16 or float32, x and w alike, got {x.dtype} and {w.dtype}")
    if not w.is_contiguous() or not (b is None or b.is_contiguous()):
        raise ValueError(f"{name} takes contiguous weights and bias, got w with strides {w.stride()}")


def linear(x, w, b=None, out=None, splits=None):
    """y = x W^T + b, rows independent of each other to the bit.  x [M, K], w [N, K], b [N] -> [M, N]

    out [M, N]: where to write on a GPU, contiguous; splits: see linear_parts. Raises ValueError for shapes that do not fit.
    """
    if not on_triton(x):
        return _linear_in_blocks(x, w, b)
    return add_parts(linear_parts(x, w, b, out, splits), x.dtype, out)


def add_parts(parts, dtype, out=None):
    """The sum of the partial sums of linear_parts, in order, as `linear` gives it.  [S, M, N] -> [M, N]"""
    if parts.shape[0] == 1:
        return parts[0]
    y = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device) if out is None else out
    if y.numel():
        _sum[(triton.cdiv(y.numel(), 1024),)](parts, y, y.numel(), parts.shape[0], 1024, **overlap(y))
    return y


def linear_parts(x, w, b=None, out=None, splits=None, late=False):
    """The partial sums of linear(x, w, b), for a consumer that adds them itself (`sum_parts`): [S, M, N]

    splits: S on a GPU, for some features of a larger weight (its num_splits); None: num_splits(N, K). S > 1: float32; the
    bias is in part 0. S = 1: the finished product in x's dtype (also on the CPU, and for so many rows that the kernel adds
    the parts itself; on a GPU it is written to `out` [M, N] if given). late: see linear_sums. Raises ValueError for shapes that
    do not fit.
    """
    if not on_triton(x):
        return _linear_in_blocks(x, w, b)[None]
    check_product("linear", x, w, b)
    check_kernel_operands("linear", x, w, b)
    late, x = late and x.is_contiguous(), x.contiguous()
    if x.shape[0] <= DECODE_ROWS or not maps_fit(x, w):
        return decode_parts(x, w, b, splits, out=out)  # never late: it may copy x, or read it by plain loads
    return prefill_parts(x, w, b, splits, out=out, late=late)


def linear_sums(x, w, b=None, out=None, late=False):
    """The sums of one range of K, which another device adds to those of others.  x [M, K], w [N, K] -> [M, N], float32 at least

    They are the bits of this range's part in linear_parts of the whole K, where ranges of K end there. out [M, N]: where to write
    on a GPU, float32 and contiguous; late: a GPU may run it beside the kernel before, which must be a product of rows of the same
    memory, itself late or not, with another `out`. Raises ValueError for shapes that do not fit.
    """
    if not on_triton(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return _linear_in_blocks(x.to(wide), w.to(wide), None if b is None else b.to(wide))
    out = torch.empty(len(x), len(w), dtype=torch.float32, device=x.device) if out is None else out
    return linear_parts(x, w, b, out, splits=1, late=late)[0]


def empty_rows(num_rows, width, dtype, device):
    """An uninitialised [num_rows, width] with room after it for a whole tile of rows, which tensor maps make use of."""
    if num_rows > DECODE_ROWS:
        room = -(-num_rows // DECODE_ROWS) * DECODE_ROWS
    else:
        room = max(num_rows, tile_rows(num_rows, dtype.itemsize))
    return torch.empty(room, width, dtype=dtype, device=device)[:num_rows]


def maps_of_rows(x, rows, depth):
    """Tensor maps of x [M, K] for the two halves of tiles of `rows` rows (the second is None if there is one half).

    Rows that a map must fill in are slow to load (qkv of an 8B, tile of 128: 65 rows 28.5 us, 128 rows 17.7). So the map covers
    the memory after x (empty_rows): its contents reach only rows that are never stored. Where x has no such room, and many rows
    would be filled in, a copy of it has.
    """
    (M, K), whole = x.shape, triton.cdiv(x.shape[0], rows) * rows
    room = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // K
    if room < whole and M <= DECODE_ROWS and rows != 16 and 3 * rows > 4 * M:
        x, room = x.new_empty(whole, K)[:M].copy_(x), whole
    shape, (half, more) = [whole if room >= whole else M, K], halves_of_tile(rows)
    return (
        TensorDescriptor(x, shape, [K, 1], [half, depth]),
        TensorDescriptor(x, shape, [K, 1], [more, depth]) if more else None,
    )


def decode_operands(x, w, launch_of, operands=1, rows=None):
    """What the decode kernels take for x [M, K] and weights w: (x, second half of x, w, rows, rows of the second half, launch).

    launch_of(rows): the launch of a row tile, made to fit the device; operands: its tiles of weights, which are loaded together by
    tensor maps, one after the other by pointers; rows: of the row tile, if it is not tile_rows. Tensor maps where they fit, else
    the tensors themselves.
    """
    one_tile, rows = rows is None, rows or tile_rows(x.shape[0], x.element_size())
    memory, itemsize = shared_memory(x.device), x.element_size()
    launch = fit_decode(launch_of(rows), rows, memory, operands, itemsize)
    if maps_fit(x, w) and not (one_tile and x.shape[0] > rows):
        maps = *maps_of_rows(x, rows, launch.depth), TensorDescriptor.from_tensor(w, [launch.features, launch.depth])
        return *maps, *halves_of_tile(rows), launch
    rows = triton.next_power_of_2(rows)
    return x, None, w, rows, 0, fit_decode(launch_of(rows), rows, memory, 1, itemsize)


def decode_parts(x, w, b=None, splits=None, launch=None, out=None, late=False):
    """linear_parts by the decode kernel, for any rows; `splits` and `launch` replace the tables' (the sweep tries them).

    launch: a Launch, or a PrefillLaunch, which has its own row tile. The operands are checked by the caller.
    """
    (M, K), N = x.shape, w.shape[0]
    S, itemsize = splits or num_splits(N, K), x.element_size()
    if S == 1 and out is not None:
        parts = out[None]
    else:
        parts = torch.empty((S, M, N), dtype=x.dtype if S == 1 else torch.float32, device=x.device)
    if not parts.numel():
        return parts
    split = split_depth(K, S)
    operands = decode_operands(
        x, w, lambda rows: launch or decode_launch(N, K, rows, itemsize, S), rows=getattr(launch, "rows", None)
    )
    x, more_x, w, rows, more_rows, chosen = operands
    # A tensor map ends where K ends, not where a range of K ends.
    assert S == 1 or split % chosen.depth == 0, (split, chosen)
    _decode[(triton.cdiv(M, rows + more_rows), triton.cdiv(N, chosen.features), S)](
        x, more_x, w, b, parts, M, N, K, split, S, rows, more_rows, chosen.features, chosen.depth, not torch.is_tensor(x),
        late,
        num_stages=chosen.stages, num_warps=chosen.warps, **overlap(parts),
    )  # fmt: skip
    return parts


def prefill_parts(x, w, b=None, splits=None, launch=None, out=None, late=False):
    """linear_parts for many rows, by the kernel that takes the launch's tiles; `splits` and `launch` replace the tables'.

    The operands are checked by the caller, and maps_fit them.
    """
    S = splits or num_splits(*w.shape)
    gpu = num_multiprocessors(x.device), shared_memory(x.device)
    launch = launch or prefill_launch(*w.shape, S, x.shape[0], *gpu, late=late)
    if launch.handover:
        return handover_product(x, w, b, S, launch, out)
    return (decode_parts if launch.in_halves else prefill_linear)(x, w, b, S, launch, out, late)


@functools.cache
def _on_onednn(dtype):
    """Whether products of this dtype on the CPU are oneDNN's own op, which takes weights in its own layout."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weight(w):
    """A copy of w [N, K] for `linear` alone, in the layout that the CPU reads fastest; where there is none, w itself.

    The products' bits stay the same. A packed copy does not follow w if w changes.
    """
    if on_triton(w) or w.device.type != "cpu" or not _on_onednn(w.dtype):
        return w
    return torch.ops.mkldnn._reorder_linear_weight(w, BLOCK_ROWS)


@functools.lru_cache(maxsize=64)
def _zeros(rows, width, dtype):
    return torch.zeros(rows, width, dtype=dtype)


def _linear_in_blocks(x, w, b):
    """The CPU's way: blocks of BLOCK_ROWS rows, the last one zero-padded, several in one call where that changes no bit."""
    check_product("linear", x, w, b)
    rows = x.shape[0]
    padding = -rows % BLOCK_ROWS
    x = torch.cat((x, _zeros(padding, x.shape[1], x.dtype))) if padding else x.contiguous()
    if x.shape[0] == BLOCK_ROWS:
        return _product(x, w, b)[:rows]
    packed = w.layout is not torch.strided
    at_once = _rows_at_once(*w.shape, x.dtype, b is not None, packed, torch.get_num_threads())
    if x.shape[0] <= at_once:
        return _product(x, w, b)[:rows]
    return torch.cat([_product(part, w, b) for part in x.split(at_once)])[:rows]


@functools.cache
def _rows_at_once(n, k, dtype, biased, packed, num_threads):
    """Number of rows that one call may compute: MOST_ROWS if no multiple of BLOCK_ROWS up to it changes a bit, else BLOCK_ROWS.

    Libraries choose kernels, and with them the order of sums, by shape and number of threads. The sums of the probe are zero but
    for rounding: every term has its opposite somewhere. So another order shows in nearly every output, in bfloat16 too.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(k, generator=generator)

    def normal(rows, opposite):
        few = torch.randn(2**10 + 1, generator=generator).to(
            dtype
        )  # repeated, at shifting places: a vocabulary is large
        half = few.repeat(-(-rows * (k // 2) // len(few)))[: rows * (k // 2)].view(rows, -1)
        return torch.cat((half, opposite * half, half.new_zeros(rows, k % 2)), 1)[:, order]

    with torch.no_grad():
        x, w = normal(MOST_ROWS, -1), normal(n, 1)
        b, w = w.new_zeros(n) if biased else None, pack_weight(w) if packed else w
        expected = torch.cat([_product(block, w, b) for block in x.split(BLOCK_ROWS)])
        for rows in range(2 * BLOCK_ROWS, MOST_ROWS + 1, BLOCK_ROWS):
            if not torch.equal(_product(x[:rows], w, b), expected[:rows]):
                return BLOCK_ROWS
    return MOST_ROWS


def _product(x, w, b):
    """The product of some blocks. Without oneDNN, features after the last multiple of FEATURES take zero-padded weights.

    Only those weights are copied: a vocabulary of 50,257 has one such feature.
    """
    if _on_onednn(x.dtype) and w.numel():
        return torch.ops.mkldnn._linear_pointwise.default(x, w, b, "none", [], "")
    multiple = FEATURES.get(x.dtype, 1)
    odd = w.shape[0] % multiple
    if not odd:
        return F.linear(x, w, b)
    even = w.shape[0] - odd
    last_b = None if b is None else F.pad(b[even:], (0, multiple - odd))
    last = F.linear(x, F.pad(w[even:], (0, 0, 0, multiple - odd)), last_b)[:, :odd]
    if not even:
        return last
    return torch.cat((F.linear(x, w[:even], None if b is None else b[:even]), last), 1)
