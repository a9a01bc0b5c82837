"""The row-invariant linear layer for many rows (more than DECODE_ROWS): linear.py's sums on large tiles.

    x [M, K], w [N, K], b [N] or None  ->  y [M, N]

Each multiprocessor keeps one program, which walks output tiles in an order that shares operands through the L2. Operands and
results go through tensor maps: loads of the next tile overlap the end of the last one. A product of two ranges of K keeps the
first range's sums in a scratch tile of its own, in the L2, because registers hold one accumulator.
Needs rows of 16 bytes (K a multiple of 8, N too); linear.py takes its other kernel where that does not hold.
"""

import functools

import torch

from ..jit import jit, tl, triton
from ..overlap import await_previous, overlap, release_next
from .linear_table import num_splits, prefill_launch, split_depth

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
            N: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Adds the bias or the ranges before this one to acc [BLOCK_M, WIDTH]; writes the sum to scratch or, the last time, to y."""
    if b is not None:
        features = feature + tl.arange(0, WIDTH)
        bias = tl.load(b + features, mask=(features < N) & (part == 0), other=0.0).to(tl.float32)
        # Without tl.where the compiler would start a product of one step from the bias, which is another order of the sum.
        acc = tl.where((row + tl.arange(0, BLOCK_M))[:, None] >= 0, acc, 0.0)
        acc = tl.where(part == 0, acc + bias[None, :], acc)
    if S > 1:
        # Masks, not branches: Triton cannot merge a loop over tiles with the loop over K around a branch.
        own = (
            scratch
            + (slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None] * WIDTH
            + tl.arange(0, WIDTH)[None, :]
        )
        acc = tl.where(part > 0, tl.load(own, mask=part > 0, other=0.0) + acc, acc)
        tl.store(own, acc, mask=part < S - 1)
        row = tl.where(part < S - 1, 1 << 30, row)  # a tensor map drops what lies outside: only the last range writes y
    y.store([row, feature], acc.to(y.dtype))


@jit(do_not_specialize=["num_rows"])
def _prefill(
    x, w, y, b, scratch, num_rows,
    N: tl.constexpr, SPLIT: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tensor maps x [M, K], w [N, K], y [M, N] (blocks of BLOCK_N / PIECES features), scratch [PROGRAMS, BLOCK_M, BLOCK_N]"""
    await_previous(OVERLAP)
    release_next(OVERLAP)
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_feature_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    WIDTH: tl.constexpr = BLOCK_N // PIECES
    # Every program's items in order: the S ranges of its first tile, of its second ...
    num_items = tl.cdiv(num_row_tiles * num_feature_tiles - program, PROGRAMS) * S
    for item in tl.range(0, num_items, flatten=True):
        tile = program + item // S * PROGRAMS
        part = item % S
        row_tile, feature_tile = tile_of(tile, num_row_tiles, num_feature_tiles, GROUP)
        row = row_tile * BLOCK_M
        feature = feature_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, SPLIT, BLOCK_K):
            values = x.load([row, part * SPLIT + k])
            weights = w.load([feature, part * SPLIT + k])
            acc = tl.dot(values, weights.T, acc)
        # One piece of the tile at a time: adding another range takes registers, storing takes shared memory.
        if PIECES == 1:
            _finish(acc, y, b, scratch, part, row, feature, program, N, S, BLOCK_M, WIDTH)
        else:
            left, right = _halves(acc)
            if PIECES == 2:
                _finish(left, y, b, scratch, part, row, feature, program * 2, N, S, BLOCK_M, WIDTH)
                _finish(right, y, b, scratch, part, row, feature + WIDTH, program * 2 + 1, N, S, BLOCK_M, WIDTH)
            else:
                first, second = _halves(left)
                third, fourth = _halves(right)
                _finish(first, y, b, scratch, part, row, feature, program * 4, N, S, BLOCK_M, WIDTH)
                _finish(second, y, b, scratch, part, row, feature + WIDTH, program * 4 + 1, N, S, BLOCK_M, WIDTH)
                _finish(third, y, b, scratch, part, row, feature + 2 * WIDTH, program * 4 + 2, N, S, BLOCK_M, WIDTH)
                _finish(fourth, y, b, scratch, part, row, feature + 3 * WIDTH, program * 4 + 3, N, S, BLOCK_M, WIDTH)


@functools.lru_cache
def num_multiprocessors(device):
    """Programs that fill the card, one each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def maps_fit(x, w):
    """True if tensor maps can describe x [M, K], w [N, K] and y [M, N]: 2 bytes an element, rows of whole 16 bytes."""
    (N, K), fits = w.shape, x.dtype in (torch.bfloat16, torch.float16)
    return fits and N % 8 == 0 and K % 8 == 0 and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0


def prefill_linear(x, w, b=None, splits=None, launch=None):
    """y = x W^T + b on large tiles; the operands are checked by the caller (linear.py).  -> [M, N]

    `splits` and `launch` replace the tables' (the sweep tries them).
    """
    (M, K), N = x.shape, w.shape[0]
    S = splits or num_splits(N, K)
    launch = launch or prefill_launch(N, K)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(M, launch.rows) * triton.cdiv(N, launch.features)
    programs = min(num_multiprocessors(x.device), tiles)
    scratch = None
    if S > 1:
        scratch = torch.empty((programs, launch.rows, launch.features), dtype=torch.float32, device=x.device)
    pieces = launch.features // (128 if S == 1 else 64)
    _prefill[(programs,)](
        TensorDescriptor.from_tensor(x, [launch.rows, launch.depth]),
        TensorDescriptor.from_tensor(w, [launch.features, launch.depth]),
        TensorDescriptor.from_tensor(y, [launch.rows, launch.features // pieces]),
        b, scratch, M, N, split_depth(K, S), S,
        launch.rows, launch.features, launch.depth, launch.group, num_multiprocessors(x.device), pieces,
        num_stages=launch.stages, num_warps=launch.warps, **overlap(y),
    )  # fmt: skip
    return y
