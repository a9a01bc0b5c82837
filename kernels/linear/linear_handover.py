"""The row-invariant linear layer for many rows, without a last wave: one program begins a tile that another one ends.

    x [M, K], w [N, K], b [N] or None        ->  [1, M, N], or its partial sums over S ranges of K: parts [S, M, N]
    x [M, K], w [2 I, K], b [2 I] or None    ->  [M, I], the gated product of gated_mlp.py

224 tiles on 132 multiprocessors take the time of 264. So every program takes an equal share of the steps along K of all tiles: the
end of a tile that the program before it began, whole tiles, and the beginning of one that the next program ends. It computes that
beginning first and hands over its sums in memory, in fp32, as they stand in registers. So every sum is still made in order, and no
bit changes. What was handed to it a program ends last: by then it is there. As no program waits before it has handed over, they
need not all run at once.
Programs of all row tiles walk the same features at the same time, so weights come from memory once. A tile of rows is a power of
two or two of them on the same weights, as 192 are. (One tile of 320 or 384 rows multiplies none in vain; several are faster.)
A stream runs one such product at a time, as the flags are the stream's: none is `late` (linear.py).
"""

import torch

from ..jit import jit, tl, triton
from ..overlap import await_previous, overlap, release_next
from ..silu_mul import silu_product
from .linear_prefill import TensorDescriptor, map_of_rows, num_multiprocessors
from .linear_table import halves_of_tile, num_shares, split_depth


@jit
def _sums(scratch, slot, offset, SLOT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where sums [ROWS, COLUMNS] are handed over: `offset` elements into the slot of a program."""
    columns = tl.arange(0, COLUMNS)
    return scratch + slot.to(tl.int64) * SLOT + offset + tl.arange(0, ROWS)[:, None] * COLUMNS + columns[None, :]


@jit
def _finish(acc, b, out, num_rows, row, feature, part, N: tl.constexpr, GATED: tl.constexpr):
    """The sums acc [rows, features] of a tile, with their bias, to out [S, M, N], or their gated product to out [M, N]"""
    rows = row + tl.arange(0, acc.shape[0])
    if GATED:
        HALF: tl.constexpr = acc.shape[1] // 2
        gate, up = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
        features = feature + tl.arange(0, HALF)
        if b is not None:
            gate += tl.load(b + features, mask=features < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(b + N + features, mask=features < N, other=0.0).to(tl.float32)[None, :]
        y = silu_product(gate, up, out.dtype.element_ty)
    else:
        features = feature + tl.arange(0, acc.shape[1])
        if b is not None:
            bias = tl.load(b + features, mask=(features < N) & (part == 0), other=0.0).to(tl.float32)
            acc = tl.where(part == 0, acc + bias[None, :], acc)
        y = acc.to(out.dtype.element_ty)
    place = (part.to(tl.int64) * num_rows + rows)[:, None] * N + features[None, :]
    tl.store(out + place, y, mask=(rows < num_rows)[:, None] & (features < N)[None, :])


@jit(do_not_specialize=["num_rows"])
def _handover(
    x, more_x, w, b, out, scratch, flags, num_rows,
    N: tl.constexpr, SPLIT: tl.constexpr, S: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tensor maps x [M, K] of BLOCK_M rows, more_x of MORE_M (0: none), w [N, K] or, GATED, [2, N, K]; out [S, M, N]

    scratch [programs, BLOCK_N * (BLOCK_M + MORE_M)], flags [programs]: of sums handed to a program, and whether they are there. All
    flags are 0 before and after.
    """
    await_previous(OVERLAP)
    release_next(OVERLAP)
    ROWS: tl.constexpr = BLOCK_M + MORE_M
    STEPS: tl.constexpr = (SPLIT + BLOCK_K - 1) // BLOCK_K
    FEATURES: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    TILES: tl.constexpr = (N + FEATURES - 1) // FEATURES
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    row = program % num_row_tiles * ROWS
    share, num_shares = program // num_row_tiles, tl.num_programs(0) // num_row_tiles
    begin = TILES * S * STEPS * share // num_shares
    end = TILES * S * STEPS * (share + 1) // num_shares
    last = (end - 1) // STEPS
    for piece in range(0, last - begin // STEPS + 1):
        tile = last - piece  # from the last to the first: the one that another program ends comes first
        first_step = tl.maximum(begin - tile * STEPS, 0)
        num_steps = tl.minimum(end - tile * STEPS, STEPS)
        feature = tile % TILES * FEATURES
        part = tile // TILES
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if MORE_M:
            more = tl.zeros((MORE_M, BLOCK_N), tl.float32)
        if first_step > 0:
            while tl.atomic_cas(flags + program, 1, 0, sem="acquire") != 1:
                pass
            # Past the L1: nothing has made its contents new.
            acc = tl.load(_sums(scratch, program, 0, BLOCK_N * ROWS, BLOCK_M, BLOCK_N), cache_modifier=".cg")
            if MORE_M:
                place = _sums(scratch, program, BLOCK_N * BLOCK_M, BLOCK_N * ROWS, MORE_M, BLOCK_N)
                more = tl.load(place, cache_modifier=".cg")
        # Told that the loop is not empty, the assembler lets products run side by side; else it thinks of loaded sums between them.
        tl.assume(first_step < num_steps)
        for step in range(first_step, num_steps):
            k = part * SPLIT + step * BLOCK_K
            if GATED:
                weights = w.load([0, feature, k]).reshape(BLOCK_N, BLOCK_K)
            else:
                weights = w.load([feature, k])
            acc = tl.dot(x.load([row, k]), weights.T, acc)
            if MORE_M:
                more = tl.dot(more_x.load([row + BLOCK_M, k]), weights.T, more)
        if num_steps < STEPS:
            after = program + num_row_tiles
            tl.store(_sums(scratch, after, 0, BLOCK_N * ROWS, BLOCK_M, BLOCK_N), acc)
            if MORE_M:
                tl.store(_sums(scratch, after, BLOCK_N * BLOCK_M, BLOCK_N * ROWS, MORE_M, BLOCK_N), more)
            tl.debug_barrier()  # all threads have stored before one says so
            tl.atomic_xchg(flags + after, 1, sem="release")
        else:
            _finish(acc, b, out, num_rows, row, feature, part, N, GATED)
            if MORE_M:
                _finish(more, b, out, num_rows, row + BLOCK_M, feature, part, N, GATED)


_flags = {}


def handover_flags(device):
    """One flag for every program, 0 between launches. A stream has its own: launches of two streams may run side by side."""
    cuda = device.type == "cuda"
    place = device, torch.cuda.current_stream(device).cuda_stream if cuda else 0
    if place not in _flags:
        made = torch.zeros(num_multiprocessors(device), dtype=torch.int32, device=device)
        if cuda and torch.cuda.is_current_stream_capturing():
            return made  # of the graph, zeroed in every replay: a warm-up before the capture spares that
        _flags[place] = made
    return _flags[place]


def handover_product(x, w, b, S, launch, out=None, gated=False):
    """The product of x [M, K] and w [N, K] in S ranges of K: [S, M, N]; gated: the one of w [2 I, K], written to out [M, I].

    S > 1: in float32; S = 1: in x's dtype, or written to out [M, N] if given, in its dtype. The operands are checked by the caller,
    and maps_fit them.
    """
    (M, K), N = x.shape, w.shape[0] // (2 if gated else 1)
    if out is None or S > 1:
        out = torch.empty((S, M, N), dtype=x.dtype if S == 1 else torch.float32, device=x.device)
    elif not gated:
        out = out[None]
    half, more = halves_of_tile(launch.rows)
    features = launch.features * (2 if gated else 1)
    if gated:
        w_map = TensorDescriptor(w, [2, N, K], [N * K, K, 1], [2, launch.features, launch.depth])
    else:
        w_map = TensorDescriptor.from_tensor(w, [launch.features, launch.depth])
    programs = num_shares(launch, N, S, M, num_multiprocessors(x.device)) * triton.cdiv(M, launch.rows)
    flags = handover_flags(x.device)
    assert 0 < programs <= len(flags), (M, launch)
    scratch = torch.empty(programs, features * launch.rows, dtype=torch.float32, device=x.device)
    _handover[(programs,)](
        map_of_rows(x, launch, half), map_of_rows(x, launch, more) if more else None,
        w_map, b, out, scratch, flags, M,
        N, split_depth(K, S), S, gated, half, more, features, launch.depth,
        num_stages=launch.stages, num_warps=launch.warps, **overlap(out),
    )  # fmt: skip
    return out
