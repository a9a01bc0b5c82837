"""From the packed q, k, v product to rotated queries and the cache, in one pass.

    qkv [S, M, (HQ + 2 HK) * D]   S parts to be added in order (fp32 if S > 1)
    positions [M]; cos, sin [P, D/2] fp32, one row per position
    cache_rows [M]               page * 64 + offset of each row's own token
    layer_kv [2, rows, D]         one layer's cache, row (page * HK + head) * PAGE + offset, written in place
    ->  q [M, HQ, D]

The parts are added and rounded, q and k of every head go through RMSNorm where the model has it (q_norm, k_norm [D]), are rotated
in the half-split layout of Llama (kernels/attention/rotary.py) and rounded; v is only rounded. Not supported: partial rotation.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from ..linear.linear import sum_parts
from ..overlap import await_previous, overlap, release_next
from ..rms_norm import rms_norm_reference
from .tree_attention import PAGE

_HEADS = 4  # heads per program


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
    shared, name = {} if shared is None else shared, (id(cos), num_kv_heads)
    if name not in shared:
        shared[name] = _angles(positions, cos, sin), kv_rows_of_heads(cache_rows, num_kv_heads, layer_kv.shape[1])
    (cos, sin), at = shared[name]
    qk = qk.to(cos.dtype)
    turned = torch.cat((qk[..., dim // 2 :], qk[..., : dim // 2]), -1)
    q, k = (qk * cos + turned * sin).to(dtype).split((num_heads, num_kv_heads), 1)
    layer_kv.view(-1, dim).index_copy_(0, at, torch.cat((k, v)).view(-1, dim))
    return q.contiguous()


def _angles(positions, cos, sin):
    """Factors of a head's elements and of the elements half a head away.  -> two [M, 1, D]"""
    cos, sin = cos[positions.long()], sin[positions.long()]
    return torch.cat((cos, cos), 1)[:, None], torch.cat((-sin, sin), 1)[:, None]


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
    qkv, positions, cos, sin, cache_rows, layer_kv, q, q_norm, k_norm, num_rows, num_cache_rows, eps,
    S: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one kind (q, then k, then v) of one row."""
    await_previous(OVERLAP)
    release_next(OVERLAP)
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
        tl.store(place + num_cache_rows * D, a, mask=mask)
        tl.store(place + num_cache_rows * D + D // 2, b, mask=mask)
    else:
        if q_norm is not None:  # noqa: SIM102  (known to the compiler, the inner condition is not)
            if is_q:
                a, b = _norm_heads(a, b, q_norm, i, inside, eps, D)
        if k_norm is not None:  # noqa: SIM102
            if not is_q:
                a, b = _norm_heads(a, b, k_norm, i, inside, eps, D)
        angle = tl.load(positions + row).to(tl.int64) * (D // 2) + i
        c = tl.load(cos + angle, mask=inside, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=inside, other=0.0)[None, :]
        x, y = a.to(tl.float32), b.to(tl.float32)
        a, b = (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)
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
):
    """Rotated queries; rotated keys and the values go into the cache.  -> q [M, HQ, D] in the dtype of layer_kv

    qkv [S, M, (HQ + 2 HK) D], positions and cache_rows [M] integers, cos and sin [P, D/2], layer_kv [2, rows, D].
    q_norm, k_norm [D]: RMSNorm of each head before the rotation. shared: a dict per pass, in which the CPU's first layer leaves
    what the others need of positions and cache rows, too. Rows of page 0 belong to padding: what lands there is never used.
    Raises ValueError for shapes that do not fit.
    """
    rows, dim = qkv.shape[1], layer_kv.shape[-1]
    width = (num_heads + 2 * num_kv_heads) * dim
    if qkv.dim() != 3 or layer_kv.dim() != 3 or qkv.shape[2] != width or layer_kv.shape[0] != 2:
        raise ValueError(
            f"rotary_kv_write takes qkv [S, M, {width}] and layer_kv [2, rows, D] for {num_heads} and {num_kv_heads} heads, got "
            f"{tuple(qkv.shape)} and {tuple(layer_kv.shape)}"
        )
    if positions.shape != (rows,) or cache_rows.shape != (rows,):
        raise ValueError(
            f"rotary_kv_write takes {rows} positions and cache rows, got {tuple(positions.shape)}, {tuple(cache_rows.shape)}"
        )
    if cos.dim() != 2 or cos.shape[1] * 2 != dim or cos.shape != sin.shape:
        raise ValueError(
            f"rotary_kv_write takes cos and sin [P, {dim // 2}], got {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and norm.shape != (dim,):
            raise ValueError(f"{name} must be [{dim}], got {tuple(norm.shape)}")
    if not on_triton(layer_kv):
        return rotary_kv_write_reference(
            qkv, positions, cos, sin, cache_rows, layer_kv, num_heads, num_kv_heads, q_norm, k_norm, eps, shared
        )
    if not layer_kv.is_contiguous():
        raise ValueError(f"layer_kv must be contiguous, got strides {layer_kv.stride()}")
    q = torch.empty(rows, num_heads, dim, dtype=layer_kv.dtype, device=layer_kv.device)
    if rows:
        groups = triton.cdiv(num_heads, _HEADS) + 2 * triton.cdiv(num_kv_heads, _HEADS)
        _rotary_kv_write[(rows, groups)](
            qkv.contiguous(), positions.contiguous(), cos.contiguous(), sin.contiguous(), cache_rows.contiguous(), layer_kv, q,
            q_norm, k_norm, rows, layer_kv.shape[1], eps, qkv.shape[0], num_heads, num_kv_heads, dim, PAGE, _HEADS,
            triton.next_power_of_2(dim // 2), num_warps=1, enable_fp_fusion=False, **overlap(layer_kv),
        )  # fmt: skip
    return q
