"""Rotation of every head, against complex numbers in fp64, and what is refused."""

import pytest
import torch

from headstart.kernels.attention.rotary import rotary
from headstart.tests.kernels.row_by_row import assert_rows_agree


def drawn(rows, heads, dim, dtype=torch.float64):
    """x [M, h, D] and the angle of every row and pair [M, D / 2]."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.rand(rows, dim // 2, generator=generator, dtype=torch.float64) * 100


def turned(x, angle):
    """The same with the halves of a head as real and imaginary parts, in fp64."""
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 2), (5, 3, 8), (33, 7, 20)])
def test_pairs_are_turned_by_the_positions_angle(rows, heads, dim):
    x, angle = drawn(rows, heads, dim)
    torch.testing.assert_close(rotary(x, angle.cos(), angle.sin()), turned(x, angle), rtol=1e-12, atol=1e-12)


def test_bfloat16_is_turned_in_float32_and_rounded_once():
    x, angle = drawn(33, 3, 20, torch.bfloat16)
    cos, sin = angle.cos().float(), angle.sin().float()
    found = rotary(x, cos, sin)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rotary(x.float(), cos, sin).bfloat16())
    exact = turned(x, angle)
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


def test_a_gradient_is_turned_back(device):
    """Value and gradient: sizes that are no power of two, a gradient in another order of memory, in the dtype of x."""
    for dtype in [torch.float32] + [torch.bfloat16] * (device == "cuda"):
        x, angle = drawn(6, 3, 20, dtype)
        dy = drawn(3, 6, 20)[0].transpose(0, 1).to(device, dtype)
        own = x.to(device).requires_grad_()
        found = rotary(own, angle.cos().float().to(device), angle.sin().float().to(device))
        found.backward(dy)
        bound = dict(rtol=2.0**-7, atol=2.0**-7) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(found.detach().cpu().double(), turned(x, angle), **bound)
        torch.testing.assert_close(own.grad.cpu().double(), turned(dy.cpu(), -angle), **bound)
        assert own.grad.dtype == found.dtype == dtype


def test_angles_may_be_halves_of_wider_rows(device):
    x, angle = drawn(6, 3, 20, torch.float32)
    cos, sin = (torch.cat((one, one + 1), 1).float().to(device) for one in (angle.cos(), angle.sin()))
    found = rotary(x.to(device), cos[:, :10], sin[:, :10])
    torch.testing.assert_close(found.cpu().double(), turned(x, angle), rtol=1e-5, atol=2e-5)
    assert torch.equal(found, rotary(x.to(device), cos[:, :10].contiguous(), sin[:, :10].contiguous()))
    assert torch.equal(found, rotary(x.to(device), cos[:, :10], sin[:, :10].contiguous()))


def test_rows_do_not_depend_on_each_other():
    x, angle = drawn(80, 3, 20, torch.float32)
    table = torch.cat((x.flatten(1), angle.cos().float(), angle.sin().float()), 1)

    def turn(rows):
        x, cos, sin = rows.split((60, 10, 10), 1)
        return rotary(x.reshape(-1, 3, 20), cos, sin)

    assert_rows_agree(turn, table)


def test_shapes_that_do_not_fit_are_refused():
    x, angle = drawn(5, 3, 8)
    for given in (
        (x[0], angle, angle),
        (x, angle[:4], angle[:4]),
        (x, angle[:, :3], angle[:, :3]),
        (x, angle, angle[:, :1]),
    ):
        with pytest.raises(ValueError, match=r"rotary takes x \[M, h, D\]"):
            rotary(*given)
