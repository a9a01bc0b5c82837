"""A mixture of experts, row-invariant: each row takes the products of its own experts, and its bits depend on nothing else.

    y[m] = sum over its k experts e of  weight[m, e] * (down_e act(up_e x[m] + b_e) + c_e)

    x [M, H], index [M, k] (k different experts of each row), weights [M, k], up [E, N, H] (N = 2 I with a gate: gate rows, then up
    rows), up_bias [E, N], down [E, H, I], down_bias [E, H]  ->  [M, H]

Order of the sums: `up` has one range of K, `down` those of a plain product of its shape (linear_table.py). Within a range the
weighted experts are added in the router's order, then the ranges, all in fp32. So dividing features, or ranges, over GPUs changes
no bit (`joined`).

On a GPU each expert lists its (row, expert) pairs, in the order of rows, and a program multiplies some of them with some features
of one expert: only chosen experts are read, the grid has a fixed size, and nothing waits for the host or is added atomically. A
product's sums are those of linear.py; its tiles follow the number of rows and change no bit. On the CPU: `linear`, one expert
after the other.

Letters: M rows, k experts of a row, P = M k pairs, E experts, S ranges.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from ..shared_memory import shared_memory
from ..silu_mul import silu_mul, silu_product
from .linear import check_kernel_operands, linear, range_product
from .linear_prefill import TensorDescriptor, maps_fit
from .linear_table import decode_launch, fit_decode, gated_launch, num_splits, split_depth

SILU = "silu"  # the activation silu(gate) * up, fused into the first product
MOST_ROWS = 128  # of a tile


def experts_reference(x, index, weights, up, down, act=SILU, up_bias=None, down_bias=None):
    """The formula on the library's products, any dtype; not row-invariant.  -> [M, H]"""
    y = torch.zeros(x.shape[0], down.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in range(len(up)):
        rows, places = (index == expert).nonzero(as_tuple=True)
        hidden = torch.nn.functional.linear(x[rows], up[expert], None if up_bias is None else up_bias[expert])
        hidden = silu_mul(hidden) if act == SILU else act(hidden)
        found = torch.nn.functional.linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
        y.index_add_(0, rows, found.to(y.dtype) * weights[rows, places, None].to(y.dtype))
    return y.to(x.dtype)


@jit(do_not_specialize=["num_pairs", "num_rows"], do_not_specialize_on_alignment=["index"])
def _list_pairs(index, pairs, counts, num_pairs, num_rows, BLOCK: tl.constexpr):
    """Program e: the numbers of the pairs of expert e, ascending, to pairs [E, M], and how many there are to counts [E]."""
    expert, found = tl.program_id(0), 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        own = tl.load(index + pair, mask=pair < num_pairs, other=-1).to(tl.int32) == expert
        place = found + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(pairs + expert.to(tl.int64) * num_rows + place, pair, mask=own & (place < num_rows))
        found += tl.sum(own.to(tl.int32), 0)
    tl.store(counts + expert, tl.minimum(found, num_rows))


@jit
def _range_of_map(x, w, rows, row_mask, feature, start, K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr):  # fmt: skip
    """Sums over the range of K from `start`: rows of x by pointers, weights from the tensor map w.  -> [BLOCK_N, rows]"""
    acc = tl.zeros((BLOCK_N, rows.shape[0]), tl.float32)
    depths = tl.arange(0, BLOCK_K)
    x_tile = x + rows.to(tl.int64)[None, :] * K + depths[:, None]
    for k in range(start, start + SPLIT, BLOCK_K):
        values = tl.load(x_tile + k, mask=row_mask[None, :] & (k + depths < K)[:, None], other=0.0)
        acc = tl.dot(w.load([feature, k]), values, acc)
    return acc


@jit
def _product(x, w, rows, row_mask, first, feature, start,
             N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             MAPS: tl.constexpr):  # fmt: skip
    """Features `feature` to BLOCK_N further of the matrix that begins at row `first` of w.  -> [BLOCK_N, rows]"""
    if MAPS:
        acc = _range_of_map(x, w, rows, row_mask, first + feature, start, K, SPLIT, BLOCK_N, BLOCK_K)
    else:
        features = feature + tl.arange(0, BLOCK_N)
        own = w + first.to(tl.int64) * K
        acc = range_product(x, own, rows, features, row_mask, features < N, start, K, SPLIT, BLOCK_K)
    return acc


@jit(do_not_specialize=["num_rows", "num_pairs"])
def _expert_products(
    x, w, b, y, pairs, counts, num_rows, num_pairs,
    N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, S: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's pairs, features and range.  x [P / TOP_K, K], w [E, N, K] (a tensor map: [E N, K]) -> y [S, P, N]

    GATED: w is [E, 2 N, K], y is silu(gate) * up. b: its bias, [E, N] or [E, 2 N], or None.
    """
    place = tl.program_id(0) * BLOCK_M
    feature = tl.program_id(1) * BLOCK_N
    expert, part = tl.program_id(2) // S, tl.program_id(2) % S
    count = tl.load(counts + expert)
    if place < count:
        places = place + tl.arange(0, BLOCK_M)
        own = places < count
        pair = tl.load(pairs + expert.to(tl.int64) * num_rows + places, mask=own, other=0)
        rows, features = pair // TOP_K, feature + tl.arange(0, BLOCK_N)
        start = part * SPLIT
        target = y + (part.to(tl.int64) * num_pairs + pair)[None, :] * N + features[:, None]
        mask = own[None, :] & (features < N)[:, None]
        if GATED:
            first = expert * (2 * N)
            gate = _product(x, w, rows, own, first, feature, start, N, K, SPLIT, BLOCK_N, BLOCK_K, MAPS)
            up = _product(x, w, rows, own, first + N, feature, start, N, K, SPLIT, BLOCK_N, BLOCK_K, MAPS)
            if b is not None:
                bias = b + expert.to(tl.int64) * (2 * N) + features
                # Without tl.where the compiler would start a product of one step from the bias: another order of the sum.
                gate = tl.where(mask, gate, 0.0) + tl.load(bias, mask=features < N, other=0.0).to(tl.float32)[:, None]
                up = tl.where(mask, up, 0.0) + tl.load(bias + N, mask=features < N, other=0.0).to(tl.float32)[:, None]
            tl.store(target, silu_product(gate, up, y.dtype.element_ty), mask=mask)
        else:
            acc = _product(x, w, rows, own, expert * N, feature, start, N, K, SPLIT, BLOCK_N, BLOCK_K, MAPS)
            if b is not None:
                bias = tl.load(b + expert.to(tl.int64) * N + features, mask=features < N, other=0.0).to(tl.float32)
                acc = tl.where(mask, acc, 0.0) + bias[:, None]
            tl.store(target, acc.to(y.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["index", "weights"])
def _combine(
    parts, index, weights, b, y, num_pairs, H: tl.constexpr, S: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """parts [S, P, H], b [E, H] or None -> y [M, H]: the experts of a range in their order, then the ranges."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(S):
        of_range = tl.zeros((BLOCK,), tl.float32)
        for i in range(TOP_K):
            pair = row * TOP_K + i
            found = tl.load(parts + (part * num_pairs.to(tl.int64) + pair) * H + columns, mask=mask, other=0.0)
            if part == 0:  # noqa: SIM102 (both are the compiler's)
                if b is not None:
                    expert = tl.load(index + pair).to(tl.int64)
                    found += tl.load(b + expert * H + columns, mask=mask, other=0.0).to(tl.float32)
            of_range += tl.load(weights + pair).to(tl.float32) * found
        total += of_range
    tl.store(y + row * H + columns, total.to(y.dtype.element_ty), mask=mask)


def experts(x, index, weights, up, down, act=SILU, up_bias=None, down_bias=None, joined=None, splits=None):
    """The mixture; see the module for shapes and order.  -> [M, H]

    act: SILU (silu(gate) * up), or a function [P, N] -> [P, I] that works row by row and gives a row the same bits in any company.
    Where `up` has some of the features, other devices the others, joined makes all of them of these: of [P, I] after SILU, of
    [P, N] before any other act. Where `down` has some, so has the result; splits: ranges of K of the whole `down` (num_splits).
    Raises ValueError for shapes that do not fit.
    """
    _check(x, index, weights, up, down, act, up_bias, down_bias, joined)
    if not on_triton(x):
        return _expert_by_expert(x, index, weights, up, down, act, up_bias, down_bias, joined)
    for w, b in ((up, up_bias), (down, down_bias)):
        check_kernel_operands("experts", x, w, b)
    x, index, weights = x.contiguous(), index.contiguous(), weights.contiguous()
    (num_rows, top_k), num_experts = index.shape, len(up)
    y = torch.empty(num_rows, down.shape[1], dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    num_pairs = num_rows * top_k
    pairs = torch.empty(num_experts, num_rows, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    _list_pairs[(num_experts,)](index, pairs, counts, num_pairs, num_rows, 1024, num_warps=4)
    lists = pairs, counts, num_rows, num_pairs
    hidden = _launch(x, up, up_bias, lists, top_k, gated=act == SILU)[0]
    hidden = hidden if joined is None else joined(hidden)
    hidden = hidden if act == SILU else act(hidden).contiguous()
    parts = _launch(hidden, down, None, lists, 1, parts=splits or num_splits(*down.shape[1:]))
    width, block = down.shape[1], 1024
    _combine[(num_rows, triton.cdiv(width, block))](
        parts,
        index,
        weights,
        down_bias,
        y,
        num_pairs,
        width,
        len(parts),
        top_k,
        block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


def _launch(x, w, b, lists, top_k, gated=False, parts=None):
    """The products of all pairs.  x [P / top_k, K] -> in x's dtype [1, P, N]; in so many fp32 parts [parts, P, N]"""
    pairs, counts, num_rows, num_pairs = lists
    num_experts, features, K = w.shape
    N, S, itemsize = features // (2 if gated else 1), parts or 1, x.element_size()
    y = torch.empty(S, num_pairs, N, dtype=torch.float32 if parts else x.dtype, device=x.device)
    rows = tile_of_pairs(num_rows, num_pairs, num_experts, itemsize)
    launch = gated_launch(N, K, rows, itemsize) if gated else decode_launch(N, K, rows, itemsize, parts)
    maps = itemsize == 2 and maps_fit(x, w.view(-1, K))
    launch = fit_decode(launch, rows, shared_memory(x.device), 2 if gated and maps else 1, itemsize)
    source = TensorDescriptor.from_tensor(w.view(-1, K), [launch.features, launch.depth]) if maps else w
    grid = triton.cdiv(num_rows, rows), triton.cdiv(N, launch.features), num_experts * S
    _expert_products[grid](
        x, source, b, y, pairs, counts, num_rows, num_pairs, N, K, split_depth(K, S), S, top_k, gated,
        rows, launch.features, launch.depth, maps, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return y


def tile_of_pairs(num_rows, num_pairs, num_experts, itemsize=2):
    """Rows of a tile: a power of two from 16 on that holds twice an expert's mean share, so that few are read twice."""
    share = min(num_rows, -(-2 * num_pairs // num_experts))
    return min(max(16, triton.next_power_of_2(share)), MOST_ROWS if itemsize == 2 else 64)


def _expert_by_expert(x, index, weights, up, down, act, up_bias, down_bias, joined):
    """The CPU's way: products of one range, experts added in the router's order."""
    wide = torch.promote_types(x.dtype, torch.float32)
    found = torch.zeros(*index.shape, down.shape[1], dtype=wide)
    for expert in index.unique().tolist():
        rows, places = (index == expert).nonzero(as_tuple=True)
        hidden = linear(x[rows], up[expert], None if up_bias is None else up_bias[expert])
        hidden = silu_mul(hidden) if act == SILU else hidden
        hidden = hidden if joined is None else joined(hidden)
        hidden = hidden if act == SILU else act(hidden)
        products = linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
        found[rows, places] = products.to(wide) * weights[rows, places, None].to(wide)
    total = torch.zeros(len(x), down.shape[1], dtype=wide)
    for i in range(index.shape[1]):
        total += found[:, i]
    return total.to(x.dtype)


def _check(x, index, weights, up, down, act, up_bias, down_bias, joined):
    fits = x.dim() == index.dim() == 2 and up.dim() == down.dim() == 3 and index.shape == weights.shape
    fits = fits and len(index) == len(x) and len(up) == len(down)
    fits = (
        fits and up.shape[2] == x.shape[1] and (act != SILU or joined is not None or up.shape[1] == 2 * down.shape[2])
    )
    for w, b in ((up, up_bias), (down, down_bias)):
        fits = fits and (b is None or b.shape == w.shape[:2])
    if not fits:
        given = [None if one is None else list(one.shape) for one in (x, index, weights, up, down, up_bias, down_bias)]
        raise ValueError(
            "experts takes x [M, H], index and weights [M, k], up [E, N, H], down [E, H, I] and biases [E, N] and [E, H], with "
            f"N = 2 I where the activation has a gate; got {given}"
        )
