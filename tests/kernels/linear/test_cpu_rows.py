"""Products on the CPU at odd sizes: a row's bits in every place of a block, wherever the block begins in memory."""

import pytest
import torch

from headstart.kernels.attention.tile_attention import ROWS, TILE, _fold
from headstart.kernels.linear.linear import BLOCK_ROWS, linear

WIDTHS = (*range(1, 28), 33, 40, 50, 65, 72, 97, 100, 129)
DEPTHS = (1, 5, 6, 10, 16, 33, 50, 64, 77, 257)


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_place_of_a_block(threads, dtype):
    generator = torch.Generator().manual_seed(0)
    differing = []
    for n in WIDTHS:
        for k in DEPTHS:
            w, row = (torch.randn(size, k, generator=generator).to(dtype) for size in (n, 1))
            block = row.expand(BLOCK_ROWS, k).contiguous()
            shifted = torch.empty(block.numel() + 1, dtype=dtype)[1:].view_as(block).copy_(block)
            found = torch.cat([linear(block, w), linear(shifted, w), linear(row, w)])
            if not torch.equal(found, found[:1].expand_as(found)):
                differing.append((n, k))
    assert not differing


def test_a_tile_gives_a_row_the_same_bits_in_every_place_and_number_of_tiles(threads):
    generator = torch.Generator().manual_seed(0)
    differing = []
    for dim in range(1, 257):
        q = torch.randn(dim, generator=generator)
        k, v = torch.randn(2, TILE, dim, generator=generator)
        expected = None
        for count in (1, 2, 7):
            found = _fold(q.expand(count, ROWS, dim) * dim**-0.5, *(x.repeat(count, 1, 1) for x in (k, v)))
            expected = expected or [x[:1, :1].clone() for x in found]
            if not all(torch.equal(x, one.expand_as(x)) for x, one in zip(found, expected)):
                differing.append((dim, count))
    assert not differing
