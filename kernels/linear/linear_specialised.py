"""The products of many rows on a warp-specialised kernel: the sums of linear_prefill.py, the same bits.

    x [M, K], w [N, K], b [N] or None    ->  [1, M, N], or its partial sums over S ranges of K: parts [S, M, N]
    x [M, K], w [2 I, K], b [2 I] or None  ->  silu(x Wg^T) * (x Wu^T) [M, I], as gated_mlp.py has it

Each multiprocessor keeps one program, which walks output tiles. One warp of it loads x and w through tensor maps into a ring of
stages. Consumers of four warps each multiply 64 rows by all features of the tile; one step of wgmma stays in flight while the next
is issued. Two barriers guard a stage: `ready` completes when its bytes have come, `empty` when every consumer has multiplied it.
A result leaves 64 columns at a time through shared memory. Where one program sums all ranges of a tile, the sums so far lie in
scratch, and every thread reads what it wrote itself. Nothing outlives a launch.

Written in Gluon, which is experimental: names change from one Triton to the next, so only those versions are taken that it was
compiled with. Not supported: float32, GPUs other than compute capability 9.x, the interpreter. linear_table.py chooses.
"""

import functools

import torch

from ..jit import INTERPRETED, jit, tl, triton
from ..overlap import await_previous, has_tensor_maps, overlap, release_next
from ..silu_mul import silu_product
from .linear_prefill import num_mapped_rows, num_multiprocessors, tile_of
from .linear_table import halves_of_tile, split_depth

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    gluon_jit = gluon.jit
except ImportError:
    gl, gluon_jit, TensorDescriptor = tl, jit, None

TRITON_VERSIONS = (["3", "6"], ["3", "7"])  # that compile this kernel
CONSUMER_ROWS = 64  # of four warps: what one wgmma takes
LOADER_REGISTERS = 24
GROUP = 16  # row tiles that walk the features together (see PREFILL_TILES)


@gluon_jit
def _next_stage(index, phase, STAGES: gl.constexpr):
    """The ring's next place; the phase flips whenever the ring starts over."""
    last = index == STAGES - 1
    return gl.where(last, 0, index + 1), gl.where(last, phase ^ 1, phase)


@gluon_jit
def _produce(
    x, w, more_w, values, weights, more_weights, ready, empty, num_row_tiles, num_feature_tiles, steps,
    C: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, RANGES: gl.constexpr,
    GROUP: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The warp that loads: for every tile, or range of a tile, all steps of K in order"""
    ROWS: gl.constexpr = values.shape[1]
    DEPTH: gl.constexpr = values.shape[2]
    BYTES: gl.constexpr = (C * ROWS + N1 + N2) * DEPTH * 2
    index = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), num_row_tiles * num_feature_tiles * PARTS, gl.num_programs(0)):
        row_tile, feature_tile = tile_of(item // PARTS, num_row_tiles, num_feature_tiles, GROUP)
        row, feature = row_tile * (C * ROWS), feature_tile * ((N1 + N2) // 2 if GATED else N1 + N2)
        k = item % PARTS * steps * DEPTH
        for _ in range(steps * RANGES):
            # A barrier's phase before the first is complete: the ring starts empty.
            mbarrier.wait(empty.index(index), phase ^ 1)
            bar = ready.index(index)
            mbarrier.expect(bar, BYTES)
            for c in gl.static_range(C):
                tma.async_copy_global_to_shared(x, [row + c * ROWS, k], bar, values.index(index * C + c))
            if GATED:
                tma.async_copy_global_to_shared(w, [0, feature, k], bar, weights.index(index))
            else:
                tma.async_copy_global_to_shared(w, [feature, k], bar, weights.index(index))
            if N2 > 0:
                tma.async_copy_global_to_shared(more_w, [feature + N1, k], bar, more_weights.index(index))
            k += DEPTH
            index, phase = _next_stage(index, phase, STAGES)


@gluon_jit
def _pieces_of(acc, COUNT: gl.constexpr):
    """acc [ROWS, COUNT * P] -> a tuple of COUNT tensors [ROWS, P], in order: the same registers"""
    if COUNT == 1:
        return (acc,)
    else:
        left, right = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
        return _pieces_of(left, COUNT // 2) + _pieces_of(right, COUNT // 2)


@gluon_jit
def _bias_of(piece, b, feature, num_features):
    """b [num_features] for the columns of piece [ROWS, P], features from `feature` on"""
    features = feature + gl.arange(0, piece.shape[1], layout=gl.SliceLayout(0, piece.type.layout))
    return gl.load(b + features, mask=features < num_features, other=0.0).to(gl.float32)


@gluon_jit
def _send(piece, y, outs, part, row, feature, BUFFER: gl.constexpr, BUFFERS: gl.constexpr):
    """piece [ROWS, P] in y's dtype to y [.., M, N] through shared memory; what lies outside y is dropped"""
    out = outs.index(BUFFER)
    tma.store_wait(BUFFERS - 1)  # the store that read this buffer last has read it
    out.store(piece)
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [part, row, feature], out.reshape([1, out.shape[0], out.shape[1]]))


@gluon_jit
def _finish(
    acc, y, b, sums, outs, part, row, feature, num_features, c: gl.constexpr, COLUMN: gl.constexpr, RANGES: gl.constexpr,
    BUFFERS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """A consumer's sums over range `part` of K, acc [ROWS, ..] from column COLUMN of the tile on: to y, bias added

    RANGES > 1: one program sums all ranges of a tile. Those before this one are in `sums`, and all but the last go there.
    GATED: the left half of acc are features of the gate, the right half those of up.
    """
    ROWS: gl.constexpr = acc.shape[0]
    P: gl.constexpr = outs.shape[2]
    COUNT: gl.constexpr = acc.shape[1] // P
    FIRST: gl.constexpr = c * BUFFERS
    pieces = _pieces_of(acc, COUNT)
    if GATED:
        for i in gl.static_range(COUNT // 2):
            column = feature + i * P
            gate, up = pieces[i], pieces[i + COUNT // 2]
            if b is not None:
                gate += _bias_of(gate, b, column, num_features)[None, :]
                up += _bias_of(up, b + num_features, column, num_features)[None, :]
            _send(silu_product(gate, up, y.dtype), y, outs, 0, row, column, FIRST + i % BUFFERS, BUFFERS)
    else:
        for i in gl.static_range(COUNT):
            piece, column = pieces[i], feature + COLUMN + i * P
            if RANGES == 1:
                if b is not None:
                    piece = gl.where(part == 0, piece + _bias_of(piece, b, column, num_features)[None, :], piece)
                _send(piece.to(y.dtype), y, outs, part, row, column, FIRST + (COLUMN // P + i) % BUFFERS, BUFFERS)
            else:
                rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, piece.type.layout))
                columns = gl.arange(0, P, layout=gl.SliceLayout(0, piece.type.layout))
                own = sums + (COLUMN + i * P) * ROWS + rows[:, None] * P + columns[None, :]
                before = gl.load(own, mask=(rows[:, None] >= 0) & (part > 0), other=0.0)
                if b is None:
                    piece = gl.where(part > 0, before + piece, piece)
                else:
                    piece = gl.where(part > 0, before, _bias_of(piece, b, column, num_features)[None, :]) + piece
                if part < RANGES - 1:
                    gl.store(own, piece)
                else:
                    _send(piece.to(y.dtype), y, outs, 0, row, column, FIRST + (COLUMN // P + i) % BUFFERS, BUFFERS)


@gluon_jit
def _consume(
    y, b, scratch, values, weights, more_weights, outs, ready, empty, num_row_tiles, num_feature_tiles, steps, num_features,
    c: gl.constexpr, C: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    RANGES: gl.constexpr, GROUP: gl.constexpr, BUFFERS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Consumer c of C: its rows of every tile, N1 features in one instruction and N2 in a second one"""
    ROWS: gl.constexpr = values.shape[1]
    DEPTH: gl.constexpr = values.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, N1, 16])
    if N2 > 0:
        more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, N2, 16])
    sums = scratch
    if RANGES > 1:
        sums = scratch + (gl.program_id(0) * C + c) * (ROWS * (N1 + N2))
    index = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    before = gl.to_tensor(0)
    num_items = gl.cdiv(num_row_tiles * num_feature_tiles * PARTS - gl.program_id(0), gl.num_programs(0))
    for work in range(num_items * RANGES):
        item = gl.program_id(0) + work // RANGES * gl.num_programs(0)
        row_tile, feature_tile = tile_of(item // PARTS, num_row_tiles, num_feature_tiles, GROUP)
        row, feature = (row_tile * C + c) * ROWS, feature_tile * ((N1 + N2) // 2 if GATED else N1 + N2)
        acc = gl.zeros((ROWS, N1), gl.float32, layout)
        if N2 > 0:
            more_acc = gl.zeros((ROWS, N2), gl.float32, more_layout)
        for k in range(steps):
            mbarrier.wait(ready.index(index), phase)
            block = values.index(index * C + c)
            acc = warpgroup_mma(block, weights.index(index).reshape([N1, DEPTH]).permute((1, 0)), acc, is_async=True)
            if N2 > 0:
                more_acc = warpgroup_mma(block, more_weights.index(index).permute((1, 0)), more_acc, is_async=True)
                acc, more_acc = warpgroup_mma_wait(num_outstanding=2, deps=(acc, more_acc))
            else:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            # The step before this one has been multiplied: its place in the ring is free.
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            before = index
            index, phase = _next_stage(index, phase, STAGES)
        if N2 > 0:
            acc, more_acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc, more_acc))
        else:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        part = work % RANGES if RANGES > 1 else item % PARTS
        _finish(acc, y, b, sums, outs, part, row, feature, num_features, c, 0, RANGES, BUFFERS, GATED)
        if N2 > 0:
            _finish(more_acc, y, b, sums, outs, part, row, feature, num_features, c, N1, RANGES, BUFFERS, GATED)
    tma.store_wait(0)


@gluon_jit(do_not_specialize=["num_row_tiles", "num_feature_tiles", "steps", "num_features"])
def _product(
    x, w, more_w, y, b, scratch, num_row_tiles, num_feature_tiles, steps, num_features,
    C: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, RANGES: gl.constexpr,
    GROUP: gl.constexpr, BUFFERS: gl.constexpr, GATED: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Tensor maps x [M, K], w and more_w [N, K] in N1 and N2 rows (GATED: w [2, I, K]), y [PARTS, M, N]; `steps` of a range

    A tile is PARTS pieces of work, one for each range, or one that sums RANGES of them; one of the two is 1. Launched with the
    warps of one consumer, which are the default ones.
    """
    ROWS: gl.constexpr = x.block_shape[0]
    outs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, y.block_shape[2]], y.dtype)
    values = gl.allocate_shared_memory(x.dtype, [STAGES * C, ROWS, x.block_shape[1]], x.layout)
    weights = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    if N2 > 0:
        more_weights = gl.allocate_shared_memory(more_w.dtype, [STAGES] + more_w.block_shape, more_w.layout)
    else:
        more_weights = weights
    outs = gl.allocate_shared_memory(y.dtype, [C * BUFFERS, ROWS, y.block_shape[2]], outs_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=C)
    fence_async_shared()
    await_previous(OVERLAP)
    release_next(OVERLAP)

    # Written out: a tuple bound to a name would turn constants into tensors.
    if C == 2:
        gl.warp_specialize(
            [
                (_consume, (y, b, scratch, values, weights, more_weights, outs, ready, empty, num_row_tiles, num_feature_tiles,
                            steps, num_features, 0, C, N1, N2, STAGES, PARTS, RANGES, GROUP, BUFFERS, GATED)),
                (_consume, (y, b, scratch, values, weights, more_weights, outs, ready, empty, num_row_tiles, num_feature_tiles,
                            steps, num_features, 1, C, N1, N2, STAGES, PARTS, RANGES, GROUP, BUFFERS, GATED)),
                (_produce, (x, w, more_w, values, weights, more_weights, ready, empty, num_row_tiles, num_feature_tiles, steps,
                            C, N1, N2, STAGES, PARTS, RANGES, GROUP, GATED)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (y, b, scratch, values, weights, more_weights, outs, ready, empty, num_row_tiles, num_feature_tiles,
                            steps, num_features, 0, C, N1, N2, STAGES, PARTS, RANGES, GROUP, BUFFERS, GATED)),
                (_consume, (y, b, scratch, values, weights, more_weights, outs, ready, empty, num_row_tiles, num_feature_tiles,
                            steps, num_features, 1, C, N1, N2, STAGES, PARTS, RANGES, GROUP, BUFFERS, GATED)),
                (_consume, (y, b, scratch, values, weights, more_weights, outs, ready, empty, num_row_tiles, num_feature_tiles,
                            steps, num_features, 2, C, N1, N2, STAGES, PARTS, RANGES, GROUP, BUFFERS, GATED)),
                (_produce, (x, w, more_w, values, weights, more_weights, ready, empty, num_row_tiles, num_feature_tiles, steps,
                            C, N1, N2, STAGES, PARTS, RANGES, GROUP, GATED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip


@functools.lru_cache
def can_specialise(device):
    """True where the kernel runs: compute capability 9.x, and a Triton of TRITON_VERSIONS."""
    if TensorDescriptor is None or INTERPRETED or triton.__version__.split(".")[:2] not in TRITON_VERSIONS:
        return False
    return has_tensor_maps(device) and torch.cuda.get_device_capability(device)[0] == 9


@functools.lru_cache
def _layout(box, dtype):
    """The shared memory of a tile that a tensor map loads or stores."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(box), dtype)


def _map(tensor, shape, *box):
    """A tensor map of `shape`, rows of which lie one after the other from the tensor's beginning on."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorDescriptor(tensor, list(shape), strides, list(box), _layout(box, tensor.dtype))


def specialised_linear(x, w, b, S, launch, out=None):
    """x W^T + b in S ranges of K by a SpecialisedLaunch; arguments and result of linear_prefill.py's prefill_linear."""
    (M, _), N = x.shape, w.shape[0]
    apart = launch.apart and S > 1
    parts = S if apart else 1
    if out is not None and not apart:
        y = out[None]
    else:
        y = torch.empty((parts, M, N), dtype=torch.float32 if apart else x.dtype, device=x.device)
    _launch(x, w, b, y, parts, S // parts, launch)
    return y


def specialised_gate_up_silu(x, w, b, launch, out):
    """silu(x Wg^T) * (x Wu^T) into out [M, I] by a SpecialisedLaunch, whose features are the gate's; see gate_up_silu."""
    _launch(x, w.view(2, -1, w.shape[1]), b, out[None], 1, 1, launch)
    return out


def _launch(x, w, b, y, parts, ranges, launch):
    """x [M, K], w [N, K] or [2, I, K] -> y [parts, M, N]"""
    (_, M, N), K, gated = y.shape, x.shape[1], w.dim() == 3
    first, second = halves_of_tile(launch.features)
    row_tiles, feature_tiles = triton.cdiv(M, launch.rows), triton.cdiv(N, launch.features)
    programs = min(num_multiprocessors(x.device), row_tiles * feature_tiles * parts)
    scratch = None
    if ranges > 1:
        scratch = torch.empty((programs, launch.rows, launch.features), dtype=torch.float32, device=x.device)
    weights = _map(w, w.shape, *((2, launch.features) if gated else (first,)), launch.depth)
    _product[(programs,)](
        _map(x, (num_mapped_rows(x, launch.rows), K), CONSUMER_ROWS, launch.depth),
        weights,
        _map(w, w.shape, second, launch.depth) if second else weights,
        _map(y, y.shape, 1, CONSUMER_ROWS, 128 // y.element_size()),
        b, scratch, row_tiles, feature_tiles, triton.cdiv(split_depth(K, parts * ranges), launch.depth), N,
        launch.rows // CONSUMER_ROWS, 2 * first if gated else first, second, launch.stages, parts, ranges,
        GROUP, launch.buffers, gated, launch.registers, LOADER_REGISTERS,
        num_warps=4, **overlap(y),
    )  # fmt: skip
