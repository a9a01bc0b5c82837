"""Products on the CPU at odd sizes: a row's bits in every place of a block, wherever the block begins in memory."""

import pytest
import torch
import torch.nn.functional as F

from headstart.kernels.attention.tile_attention import ROWS, TILE, _fold
from headstart.kernels.linear import linear as linear_module
from headstart.kernels.linear.linear import BLOCK_ROWS, MOST_ROWS, linear, pack_weight

WIDTHS = (*range(1, 18), 25, 33, 50, 72, 97, 129)
DEPTHS = (1, 6, 10, 33, 50, 77)


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["oneDNN", "library"])
def path(request, monkeypatch):
    """Products by oneDNN, as this machine has it, and as on a machine without it."""
    if request.param == "library":
        monkeypatch.setattr(linear_module, "_on_onednn", lambda dtype: False)
    linear_module._rows_at_once.cache_clear()
    yield
    linear_module._rows_at_once.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_in_every_place_of_a_block(threads, path, dtype):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(96, 64), (97, 48), (7, 33), (300, 704), (512, 2048)])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_with_packed_weights(path, dtype, n, k):
    generator = torch.Generator().manual_seed(0)
    w, x, b = (torch.randn(*size, generator=generator).to(dtype) for size in ((n, k), (MOST_ROWS + 11, k), (n,)))
    for bias in (None, b):
        alone = torch.cat([linear(row[None], w, bias) for row in x])
        for count in (2, BLOCK_ROWS, BLOCK_ROWS + 1, 17, 40, len(x)):
            assert torch.equal(linear(x[:count], w, bias), alone[:count])
            assert torch.equal(linear(x[:count], pack_weight(w), bias), alone[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_not_joined_where_that_changes_the_order_of_a_sum(monkeypatch, dtype):
    def product(x, w, b):
        wide = len(x) > 2 * BLOCK_ROWS
        return F.linear(x.flip(1), w.flip(1), b) if wide else F.linear(x, w, b)

    for found, expected in ((product, BLOCK_ROWS), (linear_module._product, MOST_ROWS)):
        monkeypatch.setattr(linear_module, "_product", found)
        linear_module._rows_at_once.cache_clear()
        assert linear_module._rows_at_once(256, 257, dtype, True, False, torch.get_num_threads()) == expected
    linear_module._rows_at_once.cache_clear()


@pytest.mark.parametrize(("dtype", "dims"), [(torch.float32, range(1, 257)), (torch.float64, range(1, 257, 17))])
def test_a_tile_gives_a_row_the_same_bits_in_every_place_and_number_of_tiles(threads, dtype, dims):
    generator = torch.Generator().manual_seed(0)
    differing = []
    for dim in dims:
        q = torch.randn(dim, generator=generator).to(dtype)
        k, v = torch.randn(2, TILE, dim, generator=generator).to(dtype)
        expected = None
        for count in (1, 2, 7):
            found = _fold(q.expand(count, ROWS, dim) * dim**-0.5, *(x.repeat(count, 1, 1) for x in (k, v)))
            expected = expected or [x[:1, :1].clone() for x in found]
            if not all(torch.equal(x, one.expand_as(x)) for x, one in zip(found, expected)):
                differing.append((dim, count))
    assert not differing
