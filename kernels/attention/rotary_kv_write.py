"""From the packed q, k, v product to rotated queries and the cache, in one pass.

    qkv [S, M, (HQ + 2 HK) * D]   S parts to be added in order (fp32 if S > 1)
    positions [M]; cos, sin [P, D/2], one row per position, or [P, D] with factors of their own for the second half of a head
    cache_rows [M]               page * 64 + offset of each row's own token
    layer_kv [2, rows, D]         one layer's cache, row (page * HK + head) * PAGE + offset, written in place
    ->  q [M, HQ, D]

The parts are added and rounded, q and k of every head go through RMSNorm where the model has it (q_norm, k_norm [D]), are rotated
in the half-split layout of Llama (kernels/attention/rotary.py) and rounded; v is only rounded. Without positions row r turns by
row r of cos and sin; without cos and sin nothing turns. q may be multiplied by a number at last, and is rounded again. Not
supported: partial rotation.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from ..linear.linear import sum_parts
from ..overlap import await_previous, overlap, release_next
from ..rms_norm import rms_norm_reference
from .tree_attention import PAGE


def heads_of_program(rows, has_norms):
    """(heads, warps) of a program: more for many rows. With norms always the same, since they order the norms' sums."""
    return (4, 1) if has_norms or rows < 128 else (8, 1) if rows < 512 else (16, 4)


def rotary_kv_write_reference(
    qkv,
    positions,
    cos,
    sin,
    cache_rows,
    layer_kv,
    num_heads,
    num_kv_heads,
    q_norm=None,
    k_norm=None,
    eps=0.0,
    shared=None,
    q_multiplier=1.0,
):
    """The same in plain torch operations, any dtype; writes into layer_kv."""
    dtype, dim, rows = layer_kv.dtype, layer_kv.shape[2], qkv.shape[1]
    total = qkv[0]
    for part in qkv[1:]:
        total = total + part
    heads = total.to(dtype).view(rows, -1, dim)
    qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
    if q_norm is not None or k_norm is not None:
        q, k = qk.split((num_heads, num_kv_heads), 1)
        q = q if q_norm is None else rms_norm_reference(q, q_norm, eps)
        k = k if k_norm is None else rms_norm_reference(k, k_norm, eps)
        qk = torch.cat((q, k), 1)
    shared, name = {} if shared is None else shared, (None if cos is None else cos.data_ptr(), num_kv_heads)
    if name not in shared:
        angles = None if cos is None else _angles(positions, cos, sin, dim)
        # cos is kept, lest other values come to lie where it lay.
        shared[name] = angles, kv_rows_of_heads(cache_rows, num_kv_heads, layer_kv.shape[1]), cos
    angles, at, _ = shared[name]
    if angles is not None:
        cos, sin = angles
        qk = qk.to(cos.dtype)
        turned = torch.cat((qk[..., dim // 2 :], qk[..., : dim // 2]), -1)
        qk = (qk * cos + turned * sin).to(dtype)
    q, k = qk.split((num_heads, num_kv_heads), 1)
    if q_multiplier != 1:
        q = (q.to(torch.promote_types(dtype, torch.float32)) * q_multiplier).to(dtype)
    layer_kv.view(-1, dim).index_copy_(0, at, torch.cat((k, v)).view(-1, dim))
    return q.contiguous()


def _angles(positions, cos, sin, dim):
    """Factors of a head's elements and of the elements half a head away, fp32 at least.  -> two [M, 1, D]"""
    wide, half = torch.promote_types(cos.dtype, torch.float32), dim // 2
    cos, sin = (table if positions is None else table[positions.long()] for table in (cos.to(wide), sin.to(wide)))
    if cos.shape[1] == half:
        cos, sin = torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)
    return cos[:, None], torch.cat((-sin[:, :half], sin[:, half:]), 1)[:, None]


def kv_rows_of_heads(cache_rows, num_kv_heads, num_rows):
    """Rows of the keys, then of the values, in layer_kv [2, num_rows, D] as [2 * num_rows, D].  [M] -> [2 M HK]"""
    places = cache_rows.long()
    head = torch.arange(num_kv_heads, device=places.device)
    at = (((places // PAGE)[:, None] * num_kv_heads + head) * PAGE + (places % PAGE)[:, None]).flatten()
    return torch.cat((at, at + num_rows))


@jit
def _norm_heads(a, b, w, i, inside, eps, D: tl.constexpr):
    """RMSNorm of heads given as halves a, b [heads, D/2]; rounds like kernels/rms_norm.py."""
    x, y = a.to(tl.float32), b.to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x + y * y, 1), D * 1.0)
    scale = tl.rsqrt(mean + eps)[:, None]
    w1 = tl.load(w + i, mask=inside, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(w + D // 2 + i, mask=inside, other=0.0).to(tl.float32)[None, :]
    x, y = (x * scale).to(a.dtype).to(tl.float32), (y * scale).to(a.dtype).to(tl.float32)
    return (x * w1).to(a.dtype), (y * w2).to(a.dtype)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions", "cache_rows"])
def _rotary_kv_write(
    qkv, positions, cos, sin, cache_rows, layer_kv, q, q_norm, k_norm, num_rows, num_cache_rows, eps, q_multiplier,
    S: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ANGLES: tl.constexpr,
    SCALED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one kind (q, then k, then v) of one row. ANGLES: columns of cos and sin; SCALED: q_multiplier is not 1"""
    # Before the wait, unlike elsewhere (overlap.py): attention may start at once, and reads lengths and pages.
    release_next(OVERLAP)
    await_previous(OVERLAP)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_groups: tl.constexpr = (HQ + HEADS - 1) // HEADS
    k_groups: tl.constexpr = (HK + HEADS - 1) // HEADS
    is_q, is_v = group < q_groups, group >= q_groups + k_groups
    first = tl.where(is_q, group, tl.where(is_v, group - q_groups - k_groups, group - q_groups)) * HEADS
    head = first + tl.arange(0, HEADS)  # among its kind
    packed = head + tl.where(is_q, 0, tl.where(is_v, HQ + HK, HQ))
    i = tl.arange(0, HALF)
    inside = i < D // 2
    mask = (head < tl.where(is_q, HQ, HK))[:, None] & inside[None, :]
    at = row * ((HQ + 2 * HK) * D) + packed[:, None] * D + i[None, :]
    stride = num_rows.to(tl.int64) * ((HQ + 2 * HK) * D)
    dtype: tl.constexpr = layer_kv.dtype.element_ty
    a = sum_parts(qkv, at, stride, mask, S, dtype)
    b = sum_parts(qkv, at + D // 2, stride, mask, S, dtype)
    place = tl.load(cache_rows + row).to(tl.int64)
    cache_row = (place // PAGE * HK + head) * PAGE + place % PAGE
    place = layer_kv + cache_row[:, None] * D + i[None, :]
    if is_v:
        place += num_cache_rows.to(tl.int64) * D  # beyond 2^31 where many positions are cached
        tl.store(place, a, mask=mask)
        tl.store(place + D // 2, b, mask=mask)
    else:
        if q_norm is not None:  # noqa: SIM102  (known to the compiler, the inner condition is not)
            if is_q:
                a, b = _norm_heads(a, b, q_norm, i, inside, eps, D)
        if k_norm is not None:  # noqa: SIM102
            if not is_q:
                a, b = _norm_heads(a, b, k_norm, i, inside, eps, D)
        if cos is not None:
            angle = (row if positions is None else tl.load(positions + row).to(tl.int64)) * ANGLES + i
            c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
            s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
            c2, s2 = c, s  # of the second half of a head
            if ANGLES == D:
                c2 = tl.load(cos + angle + D // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
                s2 = tl.load(sin + angle + D // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
            x, y = a.to(tl.float32), b.to(tl.float32)
            a, b = (x * c - y * s).to(dtype), (y * c2 + x * s2).to(dtype)
        if SCALED:  # noqa: SIM102
            if is_q:
                a, b = (a.to(tl.float32) * q_multiplier).to(dtype), (b.to(tl.float32) * q_multiplier).to(dtype)
        if is_q:
            place = q + (row * HQ + head)[:, None] * D + i[None, :]
        tl.store(place, a, mask=mask)
        tl.store(place + D // 2, b, mask=mask)


def rotary_kv_write(
    qkv,
    positions,
    cos,
    sin,
    cache_rows,
    layer_kv,
    num_heads,
    num_kv_heads,
    q_norm=None,
    k_norm=None,
    eps=0.0,
    shared=None,
    q_multiplier=1.0,
):
    """Rotated queries; rotated keys and the values go into the cache.  -> q [M, HQ, D] in the dtype of layer_kv

    qkv [S, M, (HQ + 2 HK) D], positions and cache_rows [M] integers, cos and sin [P, D/2] or [P, D], layer_kv [2, rows, D].
    positions None: row r of cos and sin is row r's; cos and sin None: nothing is rotated. q_norm, k_norm [D]: RMSNorm of each head
    before the rotation. shared: a dict per pass, in which the CPU's first layer leaves what the others need of positions and cache
    rows, too. q_multiplier: of the queries. Rows of page 0 belong to padding: what lands there is never used.
    Without heads of queries (num_heads 0) the keys and values alone are written. Raises ValueError for shapes that do not fit.
    """
    rows, dim = qkv.shape[1], layer_kv.shape[-1]
    width = (num_heads + 2 * num_kv_heads) * dim
    if qkv.dim() != 3 or layer_kv.dim() != 3 or qkv.shape[2] != width or layer_kv.shape[0] != 2 or dim % 2:
        raise ValueError(
            f"rotary_kv_write takes qkv [S, M, {width}] and layer_kv [2, rows, D], D even, for {num_heads} and {num_kv_heads} "
            f"heads, got {tuple(qkv.shape)} and {tuple(layer_kv.shape)}"
        )
    if cache_rows.shape != (rows,) or (positions is not None and positions.shape != (rows,)):
        given = f"{None if positions is None else tuple(positions.shape)}, {tuple(cache_rows.shape)}"
        raise ValueError(f"rotary_kv_write takes {rows} positions and cache rows, got {given}")
    _check_angles(cos, sin, dim, rows if positions is None else 0)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and norm.shape != (dim,):
            raise ValueError(f"{name} must be [{dim}], got {tuple(norm.shape)}")
    if not on_triton(layer_kv):
        norms = q_norm, k_norm, eps, shared, q_multiplier
        return rotary_kv_write_reference(
            qkv, positions, cos, sin, cache_rows, layer_kv, num_heads, num_kv_heads, *norms
        )
    if not layer_kv.is_contiguous():
        raise ValueError(f"layer_kv must be contiguous, got strides {layer_kv.stride()}")
    q = torch.empty(rows, num_heads, dim, dtype=layer_kv.dtype, device=layer_kv.device)
    if rows:
        heads, warps = heads_of_program(rows, q_norm is not None or k_norm is not None)
        groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
        cos, sin, positions = (None if x is None else x.contiguous() for x in (cos, sin, positions))
        _rotary_kv_write[(rows, groups)](
            qkv.contiguous(), positions, cos, sin, cache_rows.contiguous(), layer_kv, q, q_norm, k_norm,
            rows, layer_kv.shape[1], eps, q_multiplier,
            qkv.shape[0], num_heads, num_kv_heads, dim, PAGE, 0 if cos is None else cos.shape[1], q_multiplier != 1,
            heads, triton.next_power_of_2(dim // 2), num_warps=warps, enable_fp_fusion=False, **overlap(layer_kv),
        )  # fmt: skip
    return q


def _check_angles(cos, sin, dim, least):
    """ValueError unless cos and sin are both None, or tables of at least so many rows."""
    if cos is None and sin is None:
        return
    shapes = [None if table is None else tuple(table.shape) for table in (cos, sin)]
    if None in shapes or shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] not in (dim // 2, dim):
        raise ValueError(
            f"rotary_kv_write takes cos and sin [P, {dim // 2}] or [P, {dim}], got {shapes[0]}, {shapes[1]}"
        )
    if len(cos) < least:
        raise ValueError(f"rotary_kv_write takes {least} rows of cos and sin without positions, got {len(cos)}")
