"""Rows of the embedding table, with and without a constant factor."""

import pytest
import torch

from headstart.kernels.embedding import embed


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("width", [5, 64, 1500])
def test_rows_are_the_tables_own_bits(kernel_device, width, index):
    for dtype in (torch.float32, torch.bfloat16):
        table = torch.randn(50, width, device=kernel_device).to(dtype)
        tokens = torch.tensor([3, 0, 49, 3], device=kernel_device, dtype=index)
        assert torch.equal(embed(tokens, table), table[tokens.long()])


def test_a_multiplier_is_applied_in_fp32_and_rounded_once(kernel_device):
    dtype = torch.bfloat16 if kernel_device == "cuda" else torch.float32
    table = torch.randn(50, 33, device=kernel_device).to(dtype)
    tokens = torch.tensor([3, 0, 49], device=kernel_device)
    expected = (table[tokens].float() * torch.tensor(12.3, dtype=torch.float32, device=kernel_device)).to(dtype)
    assert torch.equal(embed(tokens, table, 12.3), expected)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="embed takes"):
        embed(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, 4))
