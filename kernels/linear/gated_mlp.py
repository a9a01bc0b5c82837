"""The first half of a gated MLP in one kernel: y = silu(x Wg^T) * (x Wu^T), gate and up rounded to x's dtype first.

    x [M, K], w [2 I, K] (I gate rows, then I up rows), b [2 I] or None  ->  [M, I]

Every program computes a tile of the gate and the matching tile of up, so the [M, 2 I] product never goes to memory. The sums
are those of linear.py, the last step is silu_mul.py's: bits equal linear followed by silu_mul, for any number of rows.
Fused where the product of w has one range of K (linear_table.py: every wide model); else it is linear, then silu_mul.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from ..overlap import await_previous, overlap, release_next
from ..shared_memory import shared_memory
from ..silu_mul import silu_mul, silu_mul_reference, silu_product
from .linear import (
    check_kernel_operands,
    check_product,
    decode_operands,
    empty_rows,
    linear,
    linear_reference,
    range_product,
)
from .linear_handover import handover_product
from .linear_prefill import TensorDescriptor, map_of_rows, maps_fit, num_multiprocessors, tile_of
from .linear_table import DECODE_ROWS, gated_launch, gated_prefill_launch, num_splits


def gate_up_silu_reference(x, w, b=None):
    """The formula on the library's product, any dtype; not row-invariant.  [M, K], [2 I, K] -> [M, I]"""
    return silu_mul_reference(linear_reference(x, w, b))


@jit
def _store_tile(gate, up, b, out, num_rows, row, features, I: tl.constexpr, BLOCK_M: tl.constexpr):
    """silu(gate) * up, [BLOCK_N, BLOCK_M] each and without their biases yet, to the rows from `row` of out [M, I]"""
    rows = row + tl.arange(0, BLOCK_M)
    if b is not None:
        # Without tl.where the compiler would start a product of one step from the bias, which is another order of the sum.
        gate = tl.where((rows < num_rows)[None, :], gate, 0.0)
        up = tl.where((rows < num_rows)[None, :], up, 0.0)
        gate += tl.load(b + features, mask=features < I, other=0.0).to(tl.float32)[:, None]
        up += tl.load(b + I + features, mask=features < I, other=0.0).to(tl.float32)[:, None]
    place = rows.to(tl.int64)[None, :] * I + features[:, None]
    mask = (rows < num_rows)[None, :] & (features < I)[:, None]
    tl.store(out + place, silu_product(gate, up, out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_rows"])
def _decode(
    x, more_x, w, b, out, num_rows,
    I: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MAPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_M + MORE_M] of the gate and of up, weights on the left (see linear.py)."""
    row = tl.program_id(0) * (BLOCK_M + MORE_M)
    feature = tl.program_id(1) * BLOCK_N
    features = feature + tl.arange(0, BLOCK_N)
    await_previous(OVERLAP)
    if MAPS:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if MORE_M:
            more_gate = tl.zeros((BLOCK_N, MORE_M), tl.float32)
            more_up = tl.zeros((BLOCK_N, MORE_M), tl.float32)
            for k in range(0, K, BLOCK_K):
                values = x.load([row, k]).T
                more_values = more_x.load([row + BLOCK_M, k]).T
                gate_weights = w.load([feature, k])
                up_weights = w.load([I + feature, k])
                gate = tl.dot(gate_weights, values, gate)
                more_gate = tl.dot(gate_weights, more_values, more_gate)
                up = tl.dot(up_weights, values, up)
                more_up = tl.dot(up_weights, more_values, more_up)
        else:
            for k in range(0, K, BLOCK_K):
                values = x.load([row, k]).T
                gate = tl.dot(w.load([feature, k]), values, gate)
                up = tl.dot(w.load([I + feature, k]), values, up)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        row_mask, feature_mask = rows < num_rows, features < I
        gate = range_product(x, w, rows, features, row_mask, feature_mask, 0, K, K, BLOCK_K)
        up = range_product(x, w, rows, I + features, row_mask, feature_mask, 0, K, K, BLOCK_K)
    release_next(OVERLAP)
    _store_tile(gate, up, b, out, num_rows, row, features, I, BLOCK_M)
    if MORE_M:
        _store_tile(more_gate, more_up, b, out, num_rows, row + BLOCK_M, features, I, MORE_M)


@jit(do_not_specialize=["num_rows"])
def _prefill(
    x, w, y, b, num_rows,
    I: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tensor maps x [M, K], w [2, I, K], y [M, I]: large tiles, one program a multiprocessor (see linear_prefill.py).

    A tile of the gate and the tile of up are one operand of 2 * BLOCK_N features: the widest instruction reads it at full rate;
    two instructions of half the width reached 0.77 of the library's rate.
    """
    await_previous(OVERLAP)
    release_next(OVERLAP)
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_feature_tiles: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    for item in tl.range(tl.program_id(0), num_row_tiles * num_feature_tiles, PROGRAMS, flatten=True):
        row_tile, feature_tile = tile_of(item, num_row_tiles, num_feature_tiles, GROUP)
        row = row_tile * BLOCK_M
        feature = feature_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            values = x.load([row, k])
            weights = w.load([0, feature, k]).reshape(2 * BLOCK_N, BLOCK_K)  # the gate's rows, then up's
            acc = tl.dot(values, weights.T, acc)
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        if b is not None:
            features = feature + tl.arange(0, BLOCK_N)
            gate += tl.load(b + features, mask=features < I, other=0.0).to(tl.float32)[None, :]
            up += tl.load(b + I + features, mask=features < I, other=0.0).to(tl.float32)[None, :]
        y.store([row, feature], silu_product(gate, up, y.dtype))


def gate_up_silu(x, w, b=None, launch=None, splits=None):
    """silu(x Wg^T) * (x Wu^T), rows independent of each other to the bit.  x [M, K], w [2 I, K], b [2 I] -> [M, I]

    Raises ValueError for shapes that do not fit and for an odd number of weight rows. `launch` replaces the tables' (the sweep
    tries them); splits: see linear_parts.
    """
    check_product("gate_up_silu", x, w, b)
    if w.shape[0] % 2:
        raise ValueError(f"gate_up_silu takes w [2 I, K], gate rows then up rows, got {tuple(w.shape)}")
    if not on_triton(x) or (splits or num_splits(*w.shape)) > 1:
        return silu_mul(linear(x, w, b, splits=splits))
    check_kernel_operands("gate_up_silu", x, w, b)
    x = x.contiguous()
    (M, K), width = x.shape, w.shape[0] // 2
    y = empty_rows(M, width, x.dtype, x.device)
    if not y.numel():
        return y
    programs, many = num_multiprocessors(x.device), M > DECODE_ROWS and width % 8 == 0 and maps_fit(x, w)
    if many:
        launch = launch or gated_prefill_launch(width, K, M, programs, shared_memory(x.device))
    if many and launch.handover:
        return handover_product(x, w, b, 1, launch, y, gated=True)
    if many and not launch.in_halves:
        tiles = triton.cdiv(M, launch.rows) * triton.cdiv(width, launch.features)
        _prefill[(min(programs, tiles),)](
            map_of_rows(x, launch),
            TensorDescriptor(w, [2, width, K], [width * K, K, 1], [2, launch.features, launch.depth]),
            TensorDescriptor.from_tensor(y, [launch.rows, launch.features]),
            b, M, width, K, launch.rows, launch.features, launch.depth, launch.group, programs,
            num_stages=launch.stages, num_warps=launch.warps, **overlap(y),
        )  # fmt: skip
        return y
    itemsize = x.element_size()
    rows = getattr(launch, "rows", None)
    operands = decode_operands(x, w, lambda rows: launch or gated_launch(width, K, rows, itemsize), 2, rows)
    x, more_x, w, rows, more_rows, chosen = operands
    _decode[(triton.cdiv(M, rows + more_rows), triton.cdiv(width, chosen.features))](
        x, more_x, w, b, y, M, width, K, rows, more_rows, chosen.features, chosen.depth, not torch.is_tensor(x),
        num_stages=chosen.stages, num_warps=chosen.warps, **overlap(y),
    )  # fmt: skip
    return y
