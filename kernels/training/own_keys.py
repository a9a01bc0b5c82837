"""Attention over more keys, those of a row's own later steps, joined exactly with attention that is already done.

    s_i  = q . k_i / sqrt(D)
    all  = log(exp(normaliser) + sum exp(s_i))
    y    = exp(normaliser - all) out + sum exp(s_i - all) v_i

out is attention over other keys, normaliser the log of its sum of exponentials (packed_attention.py). Every row of a query head has
C keys of its own, the same for all query heads of a group. On a GPU one pass over memory forward, one backward, and no score is
written; plain torch makes fp32 copies of all keys and values, repeated for each query head. All arithmetic is fp32 at least.

Letters: B rows of a batch, T tokens per row, HQ and HK query and key heads, G = HQ / HK, D head dimension, C own keys of a token.
"""

import torch

from ..jit import jit, on_triton, tl, triton


def attend_own_keys_reference(out, normaliser, q, keys, values):
    """The formula in plain torch, whose gradients autograd finds."""
    group = q.shape[1] // keys.shape[3]
    # [B, HQ, T, C, D]
    k, v = (_wide(part.permute(1, 3, 2, 0, 4)).repeat_interleave(group, 1) for part in (keys, values))
    scores = (_wide(q)[..., None, :] * k).sum(-1) * q.shape[-1] ** -0.5  # [B, HQ, T, C]
    total = torch.logaddexp(normaliser, scores.logsumexp(-1))
    own = ((scores - total[..., None]).exp()[..., None] * v).sum(-2)
    return (_wide(out) * (normaliser - total).exp()[..., None] + own).to(out.dtype)


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


@jit
def _own_keys_forward(
    out, normaliser, q, keys, values, y, total, num_tokens, scale,
    out_b, out_h, out_t, norm_b, norm_h, norm_t, q_b, q_h, q_t, every_token,
    COUNT: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One token and key head. y and total: [B, T, HQ, D] and [B, T, HQ]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = token // num_tokens, token % num_tokens
    g, d = tl.arange(0, GROUP)[:, None], tl.arange(0, DIM)[None]
    row, inside = head * G + g, (g < G) & (d < D)  # query heads
    queries = tl.load(q + b * q_b + row * q_h + t * q_t + d, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(out + b * out_b + row * out_h + t * out_t + d, mask=inside, other=0.0).to(tl.float32)
    top = tl.load(normaliser + b * norm_b + row * norm_h + t * norm_t, mask=g < G, other=0.0)  # [GROUP, 1]
    mass = tl.full((GROUP, 1), 1.0, tl.float32)
    for i in tl.static_range(COUNT):
        at = ((i * every_token + token) * HK + head) * D + d
        k = tl.load(keys + at, mask=d < D, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=d < D, other=0.0).to(tl.float32)
        score = tl.sum(queries * k, 1)[:, None] * scale
        highest = tl.maximum(top, score)
        before, now = tl.exp(top - highest), tl.exp(score - highest)
        mixed = mixed * before + now * v
        mass = mass * before + now
        top = highest
    place = token * (HK * G) + row
    tl.store(y + place * D + d, (mixed / mass).to(y.dtype.element_ty), mask=inside)
    tl.store(total + place, top + tl.log(mass), mask=g < G)


@jit
def _own_keys_backward(
    out, normaliser, q, keys, values, total, dy, d_out, d_normaliser, dq, d_keys, d_values, num_tokens, scale,
    out_b, out_h, out_t, norm_b, norm_h, norm_t, q_b, q_h, q_t, dy_b, dy_h, dy_t, every_token,
    COUNT: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One token and key head. With p the weights of out and of the own keys: d score = p (dy . v - sum of p dy . v)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = token // num_tokens, token % num_tokens
    g, d = tl.arange(0, GROUP)[:, None], tl.arange(0, DIM)[None]
    row, inside = head * G + g, (g < G) & (d < D)
    queries = tl.load(q + b * q_b + row * q_h + t * q_t + d, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(out + b * out_b + row * out_h + t * out_t + d, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + b * dy_b + row * dy_h + t * dy_t + d, mask=inside, other=0.0).to(tl.float32)
    place = token * (HK * G) + row
    every = tl.load(total + place, mask=g < G, other=0.0)
    share = tl.exp(tl.load(normaliser + b * norm_b + row * norm_h + t * norm_t, mask=g < G, other=0.0) - every)
    along = tl.sum(grad * mixed, 1)[:, None]  # [GROUP, 1]
    mean = share * along
    for i in tl.static_range(COUNT):
        at = ((i * every_token + token) * HK + head) * D + d
        k = tl.load(keys + at, mask=d < D, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=d < D, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(queries * k, 1)[:, None] * scale - every)
        mean += p * tl.sum(grad * v, 1)[:, None]
    tl.store(d_out + place * D + d, (share * grad).to(d_out.dtype.element_ty), mask=inside)
    tl.store(d_normaliser + (b * (HK * G) + row) * num_tokens + t, share * (along - mean), mask=g < G)
    total_dq = tl.zeros((GROUP, DIM), tl.float32)
    for i in tl.static_range(COUNT):
        at = ((i * every_token + token) * HK + head) * D + d
        k = tl.load(keys + at, mask=d < D, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=d < D, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(queries * k, 1)[:, None] * scale - every)
        d_score = p * (tl.sum(grad * v, 1)[:, None] - mean) * scale
        total_dq += d_score * k
        # Rows past the group hold zeros in queries and grad.
        tl.store(d_keys + at, tl.sum(d_score * queries, 0)[None].to(d_keys.dtype.element_ty), mask=d < D)
        tl.store(d_values + at, tl.sum(p * grad, 0)[None].to(d_values.dtype.element_ty), mask=d < D)
    tl.store(dq + place * D + d, total_dq.to(dq.dtype.element_ty), mask=inside)


class _AttendOwnKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, normaliser, q, keys, values):
        out, q = (one if one.stride(-1) == 1 else one.contiguous() for one in (out, q))
        batch, heads, length, dim = q.shape
        y = torch.empty(batch, length, heads, dim, dtype=out.dtype, device=q.device)
        total = torch.empty(batch, length, heads, dtype=torch.float32, device=q.device)
        ctx.save_for_backward(out, normaliser, q, keys, values, total)
        strides = *out.stride()[:3], *normaliser.stride(), *q.stride()[:3], q.shape[0] * q.shape[2]
        if y.numel():
            grid, sizes = _grid(keys, heads)
            _own_keys_forward[grid](out, normaliser, q, keys, values, y, total, length, dim**-0.5, *strides, **sizes)
        return y.transpose(1, 2)

    @staticmethod
    def backward(ctx, dy):
        out, normaliser, q, keys, values, total = ctx.saved_tensors
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        batch, heads, length, dim = q.shape
        d_out, dq = (torch.empty(batch, length, heads, dim, dtype=one.dtype, device=q.device) for one in (out, q))
        d_normaliser = torch.empty(batch, heads, length, dtype=normaliser.dtype, device=q.device)
        d_keys, d_values = torch.empty_like(keys), torch.empty_like(values)
        strides = *out.stride()[:3], *normaliser.stride(), *q.stride()[:3], *dy.stride()[:3], q.shape[0] * q.shape[2]
        given = out, normaliser, q, keys, values, total, dy, d_out, d_normaliser, dq, d_keys, d_values
        if q.numel():
            grid, sizes = _grid(keys, heads)
            _own_keys_backward[grid](*given, length, dim**-0.5, *strides, **sizes)
        return d_out.transpose(1, 2), d_normaliser, dq.transpose(1, 2), d_keys, d_values


def _grid(keys, num_query_heads):
    count, batch, length, num_heads, dim = keys.shape
    group = num_query_heads // num_heads
    padded = {"GROUP": triton.next_power_of_2(group), "DIM": triton.next_power_of_2(dim)}
    sizes = {"COUNT": count, "HK": num_heads, "G": group, "D": dim, "num_warps": 1, **padded}
    return (batch * length, num_heads), sizes


def attend_own_keys(out, normaliser, q, keys, values):
    """Attention over what `out` has seen and over a token's own keys, with gradients for all.

    out and q [B, HQ, T, D]; normaliser [B, HQ, T]; keys and values: C tensors [B, HK, T, D] each  ->  [B, HQ, T, D]
    """
    # Side by side in the order in which products leave them: [C, B, T, HK, D].
    keys, values = (torch.stack([one.transpose(1, 2) for one in parts]) for parts in (keys, values))
    if not on_triton(q) or q.dtype == torch.float64:
        return attend_own_keys_reference(out, normaliser, q, keys, values)
    return _AttendOwnKeys.apply(out, normaliser, q, keys, values)
