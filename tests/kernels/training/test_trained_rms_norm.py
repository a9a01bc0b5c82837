"""RMSNorm for training: value and gradients against the formula in fp64, strided gradients, frozen inputs, narrow dtypes."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from headstart.kernels.training.trained_rms_norm import PROGRAMS, trained_rms_norm, trained_rms_norm_reference

EPS = 1e-5


def draw(rows, width, dtype=torch.float64):
    generator = torch.Generator().manual_seed(width)
    x, dy = (2 * torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(dtype), torch.rand(width, generator=generator, dtype=torch.float64) + 0.5, dy.to(dtype)


def results(x, w, dy):
    """(y, dx, dw)"""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = trained_rms_norm(x, w, EPS)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def exact(x, w, dy):
    return results(*(one.detach().cpu().double() for one in (x, w, dy)))


# One row, several rows in a tile, more rows than programs take at once; widths that are no power of two.
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (37, 129), (2 * PROGRAMS + 3, 4097), (300, 16)])
def test_value_and_gradients_are_the_formulas(device, rows, width):
    if rows > PROGRAMS and device == "cpu":
        rows = 3  # of a wide row the interpreter takes its time
    given = [one.to(device, torch.float32) for one in draw(rows, width)]
    for found, expected in zip(results(*given), exact(*given), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.interpreter
def test_programs_share_many_rows(monkeypatch):
    monkeypatch.setattr("headstart.kernels.training.trained_rms_norm.PROGRAMS", 2)
    monkeypatch.setattr("headstart.kernels.training.trained_rms_norm.TILE", 16)
    given = [one.float() for one in draw(13, 7)]
    for found, expected in zip(results(*given), exact(*given), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_part_of_wider_rows_is_read_where_it_lies(device):
    x, w, dy = (one.to(device, torch.float32) for one in draw(6, 40))
    wide = torch.randn(6, 100, device=device)
    wide[:, 60:] = dy
    for found, expected in zip(results(x.view(2, 3, 40), w, wide.view(2, 3, 100)[..., 60:]), results(x, w, dy)):
        torch.testing.assert_close(found.view(expected.shape), expected, rtol=0, atol=0)


def test_a_checkpointed_step_has_the_same_gradients(device):
    given = [one.to(device, torch.float32) for one in draw(6, 40)]
    x, w = (one.clone().requires_grad_() for one in given[:2])
    checkpoint(lambda x: trained_rms_norm(x, w, EPS), x, use_reentrant=False).backward(given[2])
    for found, expected in zip((x.grad, w.grad), results(*given)[1:], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_frozen_input_gets_no_gradient(device):
    x, w, dy = (one.to(device, torch.float32) for one in draw(6, 40))
    expected = results(x, w, dy)[2]
    w.requires_grad_()
    trained_rms_norm(x, w, EPS).backward(dy)
    torch.testing.assert_close(w.grad, expected, rtol=0, atol=0)
    assert x.grad is None


def test_narrow_rows_with_a_wide_weight_stay_narrow(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, w, dy = draw(70, 96, dtype)
    given = [x.to(device), w.float().to(device), dy.to(device)]
    found, wanted = results(*given), exact(*given)
    assert [one.dtype for one in found] == [dtype, dtype, torch.float32]
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found[0].cpu().double(), wanted[0], rtol=step, atol=0)  # rounded twice
    torch.testing.assert_close(found[1].cpu().double(), wanted[1], rtol=step, atol=step)
    torch.testing.assert_close(found[2].cpu().double(), wanted[2], rtol=step, atol=10 * step)


@pytest.mark.gpu
def test_the_error_of_bfloat16_is_at_most_that_of_plain_torch():
    given = [one.cuda() for one in draw(500, 4096, torch.bfloat16)]
    given[1], wanted = given[1].float(), exact(*given)
    x, w = (one.clone().requires_grad_() for one in given[:2])
    plain = trained_rms_norm_reference(x, w, EPS)
    plain.backward(given[2])
    for ours, theirs, right in zip(results(*given), (plain.detach(), x.grad, w.grad), wanted):
        error = [(one.cpu().double() - right).norm().item() for one in (ours, theirs)]
        assert error[0] <= 1.2 * error[1]


def test_no_rows_and_shapes_that_do_not_fit(device):
    w = torch.ones(4, device=device, requires_grad=True)
    x = torch.empty(0, 4, device=device, requires_grad=True)
    trained_rms_norm(x, w, EPS).sum().backward()
    assert not w.grad.any()
    with pytest.raises(ValueError, match=r"got \(0, 4\) and \(3,\)"):
        trained_rms_norm(x, w[:3], EPS)
