"""The row-invariant linear layer for many rows (more than DECODE_ROWS): linear.py's sums on large tiles.

    x [M, K], w [N, K], b [N] or None  ->  [1, M, N], or its partial sums over S ranges of K: parts [S, M, N]

Each multiprocessor keeps one program, which walks output tiles in an order that shares operands through the L2. Operands and
results go through tensor maps: loads of the next tile overlap the end of the last one. Where tiles are few, the ranges of K are
tiles of their own, for a consumer that adds them. Where they are many, one program sums all ranges of a tile and keeps the sums so
far in a scratch tile of its own, in the L2, because registers hold one accumulator.
Needs rows of 16 bytes (K a multiple of 8, N too); linear.py takes its other kernel where that does not hold.
"""

import functools

import torch

from ..jit import jit, tl, triton
from ..overlap import await_previous, has_tensor_maps, overlap, release_next
from .linear_table import split_depth

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None


@jit
def tile_of(index, num_row_tiles, num_feature_tiles, GROUP: tl.constexpr):
    """(row tile, feature tile) number `index`: GROUP row tiles walk the features together."""
    in_group = GROUP * num_feature_tiles
    first = index // in_group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    return first + index % in_group % height, index % in_group // height


@jit
def _halves(acc):
    """acc [M, N] -> its left and its right half, [M, N / 2] each"""
    return acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()


@jit
def _finish(acc, y, b, scratch, part, row, feature, slot,
            N: tl.constexpr, S: tl.constexpr, APART: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Adds the bias or the ranges before this one to acc [BLOCK_M, WIDTH]; writes the sum to scratch or, the last time, to y."""
    if b is not None:
        features = feature + tl.arange(0, WIDTH)
        bias = tl.load(b + features, mask=(features < N) & (part == 0), other=0.0).to(tl.float32)
        # Without tl.where the compiler would start a product of one step from the bias, which is another order of the sum.
        acc = tl.where((row + tl.arange(0, BLOCK_M))[:, None] >= 0, acc, 0.0)
        acc = tl.where(part == 0, acc + bias[None, :], acc)
    if S > 1 and not APART:
        # Masks, not branches: Triton cannot merge a loop over tiles with the loop over K around a branch.
        own = (
            scratch
            + (slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None] * WIDTH
            + tl.arange(0, WIDTH)[None, :]
        )
        acc = tl.where(part > 0, tl.load(own, mask=part > 0, other=0.0) + acc, acc)
        tl.store(own, acc, mask=part < S - 1)
        row = tl.where(part < S - 1, 1 << 30, row)  # a tensor map drops what lies outside: only the last range writes y
        part = 0
    y.store([part, row, feature], acc.to(y.dtype).reshape(1, BLOCK_M, WIDTH))


@jit(do_not_specialize=["num_rows"])
def _prefill(
    x, w, y, b, scratch, num_rows,
    N: tl.constexpr, SPLIT: tl.constexpr, S: tl.constexpr, APART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr, LATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tensor maps x [M, K], w [N, K], y [S or 1, M, N] in PIECES of BLOCK_N features; scratch [PROGRAMS, BLOCK_M, BLOCK_N]"""
    if not LATE:
        await_previous(OVERLAP)
    release_next(OVERLAP)
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_feature_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    WIDTH: tl.constexpr = BLOCK_N // PIECES
    # A tile is one piece of work, or each of its S ranges is one. Every program's pieces in order, of whole tiles range by range.
    APIECE: tl.constexpr = 1 if APART else S
    num_works = num_row_tiles * num_feature_tiles * (S // APIECE)
    num_items = tl.cdiv(num_works - program, PROGRAMS) * APIECE
    for item in tl.range(0, num_items, flatten=True):
        work = program + item // APIECE * PROGRAMS
        part = work % S if APART else item % S
        row_tile, feature_tile = tile_of(work // (S // APIECE), num_row_tiles, num_feature_tiles, GROUP)
        row = row_tile * BLOCK_M
        feature = feature_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, SPLIT, BLOCK_K):
            values = x.load([row, part * SPLIT + k])
            weights = w.load([feature, part * SPLIT + k])
            acc = tl.dot(values, weights.T, acc)
        # One piece of the tile at a time: adding another range takes registers, storing takes shared memory.
        if PIECES == 1:
            _finish(acc, y, b, scratch, part, row, feature, program, N, S, APART, BLOCK_M, WIDTH)
        else:
            left, right = _halves(acc)
            if PIECES == 2:
                _finish(left, y, b, scratch, part, row, feature, program * 2, N, S, APART, BLOCK_M, WIDTH)
                _finish(right, y, b, scratch, part, row, feature + WIDTH, program * 2 + 1, N, S, APART, BLOCK_M, WIDTH)
            else:
                first, second = _halves(left)
                third, fourth = _halves(right)
                slot = program * 4
                _finish(first, y, b, scratch, part, row, feature, slot, N, S, APART, BLOCK_M, WIDTH)
                _finish(second, y, b, scratch, part, row, feature + WIDTH, slot + 1, N, S, APART, BLOCK_M, WIDTH)
                _finish(third, y, b, scratch, part, row, feature + 2 * WIDTH, slot + 2, N, S, APART, BLOCK_M, WIDTH)
                _finish(fourth, y, b, scratch, part, row, feature + 3 * WIDTH, slot + 3, N, S, APART, BLOCK_M, WIDTH)
    if LATE:
        await_previous(OVERLAP)


@functools.lru_cache
def num_multiprocessors(device):
    """Programs that fill the card, one each (in the interpreter: an H200's)."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def maps_fit(x, w):
    """True if tensor maps can describe x [M, K], w [N, K] and y [M, N]: 2 bytes an element, rows of whole 16 bytes.

    Never on a GPU without tensor maps; the interpreter has them.
    """
    (N, K), fits = w.shape, x.dtype in (torch.bfloat16, torch.float16)
    fits = fits and (not x.is_cuda or has_tensor_maps(x.device))
    return fits and N % 8 == 0 and K % 8 == 0 and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0


def map_of_rows(x, launch, block=None):
    """Tensor map of x [M, K] in row tiles of a launch, over the memory after x where it goes on (empty_rows).

    What stands there reaches only rows that are never stored. Rows that a map must fill in are slow to load.
    block: rows that are loaded at a time, None: a tile's
    """
    rows, width = x.shape
    room = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // width
    whole = triton.cdiv(rows, launch.rows) * launch.rows
    return TensorDescriptor(
        x, [whole if room >= whole else rows, width], [width, 1], [block or launch.rows, launch.depth]
    )


def prefill_linear(x, w, b, S, launch, out=None, late=False):
    """x W^T + b in S ranges of K on the large tiles of a PrefillLaunch; the operands are checked by the caller (linear.py).

    -> [1, M, N] in x's dtype, or the partial sums [S, M, N] in float32 if the launch leaves ranges apart. out [M, N]: where to
    write a product that is not in parts, and in which dtype; late: see linear_sums.
    """
    (M, K), N = x.shape, w.shape[0]
    multiprocessors = num_multiprocessors(x.device)
    apart = launch.apart and S > 1
    parts = S if apart else 1
    if out is not None and not apart:
        y = out[None]
    else:
        y = torch.empty((parts, M, N), dtype=torch.float32 if apart else x.dtype, device=x.device)
    tiles = triton.cdiv(M, launch.rows) * triton.cdiv(N, launch.features) * parts
    programs = min(multiprocessors, tiles)
    scratch = None
    if S > 1 and not apart:
        scratch = torch.empty((programs, launch.rows, launch.features), dtype=torch.float32, device=x.device)
    pieces = launch.features // (128 if S == 1 and y.dtype == x.dtype else 64)
    _prefill[(programs,)](
        map_of_rows(x, launch),
        TensorDescriptor.from_tensor(w, [launch.features, launch.depth]),
        TensorDescriptor(y, [parts, M, N], [M * N, N, 1], [1, launch.rows, launch.features // pieces]),
        b, scratch, M, N, split_depth(K, S), S, apart,
        launch.rows, launch.features, launch.depth, launch.group, multiprocessors, pieces, late,
        num_stages=launch.stages, num_warps=launch.warps, **overlap(y),
    )  # fmt: skip
    return y
