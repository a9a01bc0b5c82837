"""silu(gate) * up: against torch's own in fp64, at the ends of the exponential, rows that keep to themselves."""

import pytest
import torch

from headstart.kernels.silu_mul import silu_mul, silu_mul_apart
from headstart.tests.kernels.row_by_row import assert_rows_agree


@pytest.mark.parametrize("width", [1, 31, 1024, 2051])
def test_values_are_torchs_own_rounded_once(device, width):
    for dtype in [torch.float32] + [torch.bfloat16, torch.float16] * (device == "cuda"):
        x = 4 * torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(width)).to(device, dtype)
        gate, up = x.chunk(2, -1)
        found = silu_mul(x)
        assert found.dtype == dtype
        assert found.is_contiguous()
        exact = torch.nn.functional.silu(gate.double()) * up.double()
        bound = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        torch.testing.assert_close(found.double(), exact, rtol=1.01 * bound, atol=1e-7)
        assert torch.equal(silu_mul_apart(gate, up.contiguous()), found)
        assert torch.equal(silu_mul(x.T.contiguous().T), found)


def test_bfloat16_on_the_cpu_is_computed_in_float32_and_rounded_once():
    x = 4 * torch.randn(5, 2 * 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(silu_mul(x), silu_mul(x.float()).bfloat16())


def test_large_values_do_not_overflow(device):
    gate, up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]], device=device), torch.full((1, 5), 2.0, device=device)
    found = silu_mul(torch.cat((gate, up), 1))
    torch.testing.assert_close(found.cpu(), torch.tensor([[0.0, 0.0, 0.0, 180.0, 2e4]]), rtol=0, atol=1e-30)


def test_leading_axes_are_kept(device):
    gate, up = torch.randn(2, 2, 3, 7, device=device)
    found = silu_mul_apart(gate, up)
    assert found.shape == (2, 3, 7)
    assert torch.equal(found.view(6, 7), silu_mul(torch.cat((gate, up), 2).view(6, 14)))
    assert silu_mul(torch.empty(0, 14, device=device)).shape == (0, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 31, 256, 704])
def test_rows_do_not_depend_on_each_other(width, dtype):
    assert_rows_agree(silu_mul, torch.randn(80, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_each_other_on_the_gpu(dtype):
    for width in (31, 1100, 14336):
        assert_rows_agree(silu_mul, torch.randn(80, 2 * width, device="cuda").to(dtype))


def test_shapes_that_do_not_fit_are_refused():
    x = torch.randn(2, 6)
    with pytest.raises(ValueError, match="odd width of 5"):
        silu_mul(x[:, :5])
    with pytest.raises(ValueError, match="one shape and dtype"):
        silu_mul_apart(x, x[:1])
    with pytest.raises(ValueError, match="one shape and dtype"):
        silu_mul_apart(x, x.double())
