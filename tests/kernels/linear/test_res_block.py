"""x + silu(z) of all Medusa heads: values, layout, and the same bits for a row in any company."""

import pytest
import torch

from headstart.kernels.linear.res_block import add_silu


@pytest.mark.parametrize(("splits", "heads", "width"), [(1, 1, 7), (2, 3, 40), (4, 5, 1100)])
def test_heads_come_out_one_after_the_other(kernel_device, splits, heads, width):
    for dtype in [torch.float32] + [torch.bfloat16] * (kernel_device == "cuda"):
        torch.manual_seed(width)
        x = torch.randn(4, width, device=kernel_device).to(dtype)
        parts = (
            torch.randn(splits, 4, heads * width, device=kernel_device).to(torch.float32 if splits > 1 else dtype) * 4
        )
        found = add_silu(x, parts, heads)
        assert found.shape == (heads, 4, width)
        assert found.is_contiguous()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        z = total.to(dtype).view(4, heads, width)
        exact = (x.double()[:, None] + torch.nn.functional.silu(z.double())).transpose(0, 1)
        library = (x[:, None] + torch.nn.functional.silu(z)).transpose(0, 1)
        assert (found.double() - exact).norm() <= 2 * (library.double() - exact).norm()
        assert torch.equal(add_silu(x[:, None], parts, heads), found)


def test_large_values_do_not_overflow(kernel_device):
    x = torch.zeros(1, 4, device=kernel_device)
    z = torch.tensor([[[-1e4, -100.0, 100.0, 1e4]]], device=kernel_device)
    torch.testing.assert_close(add_silu(x, z, 1)[0, 0].cpu(), torch.tensor([0.0, 0.0, 100.0, 1e4]), rtol=0, atol=1e-30)


@pytest.mark.gpu
def test_a_rows_bits_depend_on_neither_company_nor_parts():
    torch.manual_seed(0)
    x, parts = torch.randn(300, 512, device="cuda").bfloat16(), torch.randn(2, 300, 3 * 512, device="cuda")
    whole = add_silu(x, parts, 3)
    assert torch.equal(add_silu(x, (parts[0] + parts[1]).bfloat16()[None], 3), whole)
    for rows in (1, 2, 17, 64, 299):
        for start in (0, 300 - rows):
            some = slice(start, start + rows)
            assert torch.equal(add_silu(x[some].clone(), parts[:, some].contiguous(), 3), whole[:, some])


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="add_silu takes"):
        add_silu(torch.zeros(2, 4), torch.zeros(1, 2, 9), 2)
