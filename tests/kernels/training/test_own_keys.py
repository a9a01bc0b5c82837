"""Attention joined with a row's own keys: against one softmax over all keys in fp64, gradients and strides included."""

import pytest
import torch

from headstart.kernels.training.own_keys import attend_own_keys

B, T = 2, 5


def draw(heads, key_heads, dim, count, dtype=torch.float64):
    """q, the keys and values of before [B, HQ, 3, D] and the own ones, as projections leave them, and a gradient."""
    generator = torch.Generator().manual_seed(dim)

    def rows(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, dy = (rows(B, T, heads, dim).transpose(1, 2) for _ in range(2))
    before = [rows(B, heads, 3, dim) for _ in range(2)]
    own = [[rows(B, T, key_heads, dim).transpose(1, 2) for _ in range(count)] for _ in range(2)]
    return q, before, own, dy


def joined(q, before, own, dy):
    """The output and the gradients of q, of the keys before and of the own keys, by the function under test."""
    leaves = [one.detach().clone().requires_grad_() for one in (q, *before, *own[0], *own[1])]
    q, k, v, *others = leaves
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    out = scores.softmax(-1).to(q.dtype) @ v
    count = len(others) // 2
    y = attend_own_keys(out, scores.logsumexp(-1), q, others[:count], others[count:])
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def exact(q, before, own, dy):
    """The same by one softmax over all keys that a row sees."""
    leaves = [one.detach().cpu().double().requires_grad_() for one in (q, *before, *own[0], *own[1])]
    q, k, v, *others = leaves
    count, group = len(others) // 2, q.shape[1] // others[0].shape[1]
    own_k, own_v = (torch.stack(part, 3).repeat_interleave(group, 1) for part in (others[:count], others[count:]))
    k, v = (one[:, :, None].expand(-1, -1, T, -1, -1) for one in (k, v))
    k, v = torch.cat((k, own_k), 3), torch.cat((v, own_v), 3)  # [B, HQ, T, 3 + C, D]
    weights = ((q[..., None, :] * k).sum(-1) * q.shape[-1] ** -0.5).softmax(-1)
    y = (weights[..., None] * v).sum(-2)
    y.backward(dy.cpu().double())
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "count"), [(4, 2, 16, 1), (6, 2, 16, 3), (7, 1, 24, 6), (2, 2, 128, 2)]
)
def test_it_is_one_softmax_over_all_keys(device, heads, key_heads, dim, count):
    q, before, own, dy = draw(heads, key_heads, dim, count, torch.float32)
    q, dy, before = q.to(device), dy.to(device), [one.to(device) for one in before]
    own = [[one.to(device) for one in part] for part in own]
    for found, expected in zip(joined(q, before, own, dy), exact(q, before, own, dy), strict=True):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=2e-5)


def test_narrow_rows_are_rounded_once(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    q, _, own, dy = draw(6, 2, 32, 4, dtype)
    out = torch.randn(B, 6, T, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    normaliser = torch.randn(B, 6, T, generator=torch.Generator().manual_seed(2))

    def results(device, kind, wide):
        given = [one.to(device, kind, copy=True).requires_grad_() for one in (out, q, *own[0], *own[1])]
        total = normaliser.to(device, wide, copy=True).requires_grad_()
        y = attend_own_keys(given[0], total, given[1], given[2:6], given[6:])
        y.backward(dy.to(device, kind))
        return [y.detach(), total.grad, *(one.grad for one in given)]

    step = torch.finfo(dtype).eps
    found = results(device, dtype, torch.float32)
    for one, right in zip(found, results("cpu", torch.float64, torch.float64), strict=True):
        torch.testing.assert_close(one.cpu().double(), right, rtol=step, atol=step / 4)
    assert {one.dtype for one in found} == {dtype, torch.float32}


def test_scores_far_above_those_before_do_not_overflow(device):
    one = torch.ones(1, 1, 1, 16, device=device, requires_grad=True)
    y = attend_own_keys(-one, torch.full((1, 1, 1), -3.0, device=device), one, [100 * one], [one])
    y.sum().backward()
    torch.testing.assert_close(y.detach().cpu(), torch.ones(1, 1, 1, 16))
    assert one.grad.isfinite().all()
