"""SiLU-and-multiply for training: value and gradients against torch's own in fp64, the ends of the exponential, narrow dtypes."""

import pytest
import torch

from headstart.kernels.training.trained_silu_mul import trained_silu_mul


def results(gate, up, dy):
    """(y, d gate, d up)"""
    gate, up = (one.detach().clone().requires_grad_() for one in (gate, up))
    y = trained_silu_mul(gate, up)
    y.backward(dy)
    return y.detach(), gate.grad, up.grad


def exact(*given):
    gate, up, dy = (one.cpu().double() for one in given)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    y = torch.nn.functional.silu(gate) * up
    y.backward(dy)
    return y.detach(), gate.grad, up.grad


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 1500)])
def test_value_and_gradients_are_torchs_own(device, shape):
    half = torch.bfloat16 if device == "cuda" else torch.float16
    for dtype in (torch.float32, half):
        generator = torch.Generator().manual_seed(len(shape))
        given = [(3 * torch.randn(shape, generator=generator)).to(device, dtype) for _ in range(3)]
        for found, expected in zip(results(*given), exact(*given), strict=True):
            assert found.dtype == dtype
            # The reference rounds SiLU before the product.
            step = 1e-6 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
            torch.testing.assert_close(found.cpu().double(), expected, rtol=step, atol=step)


def test_large_values_do_not_overflow(device):
    gate = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4], device=device)
    two = torch.full_like(gate, 2.0)
    y, d_gate, d_up = (one.cpu() for one in results(gate, two, two))
    torch.testing.assert_close(y, torch.tensor([0.0, 0.0, 0.0, 180.0, 2e4]), rtol=0, atol=1e-30)
    torch.testing.assert_close(d_gate, torch.tensor([0.0, 0.0, 2.0, 4.0, 4.0]), rtol=0, atol=1e-30)
    torch.testing.assert_close(d_up, torch.tensor([0.0, 0.0, 0.0, 180.0, 2e4]), rtol=0, atol=1e-30)


def test_strided_parts_and_no_values(device):
    both = torch.randn(4, 6, device=device)
    dy = torch.randn(3, 4, device=device).T
    found = results(*both.chunk(2, 1), dy)
    for one, other in zip(found, exact(*both.chunk(2, 1), dy), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-6)
    assert results(*(torch.empty(0, 3, device=device),) * 3)[1].shape == (0, 3)


def test_parts_that_differ_are_refused():
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="one shape and dtype"):
        trained_silu_mul(x, x[:1])
    with pytest.raises(ValueError, match="one shape and dtype"):
        trained_silu_mul(x, x.double())
