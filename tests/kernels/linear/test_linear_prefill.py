"""The products of many rows: values in small tiles, and the bits of the decode kernel."""

import pytest
import torch

from headstart.kernels.linear import linear_prefill
from headstart.kernels.linear.linear import linear, linear_reference, prefill_parts
from headstart.kernels.linear.linear_prefill import maps_fit
from headstart.kernels.linear.linear_table import PREFILL_TILES, SECOND_RANGE, PrefillLaunch
from headstart.tests.kernels.linear.products import error, operands, poison


@pytest.mark.interpreter
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("splits", "features"), [(1, 128), (1, 256), (1, 512), (2, 64), (2, 128), (3, 256)])
@pytest.mark.parametrize("apart", [False, True])
def test_values_in_the_interpreter(monkeypatch, splits, features, bias, apart):
    """Several programs, each of several tiles, in one, two and four pieces, with remainders of rows, features and depth."""
    monkeypatch.setattr(linear_prefill, "num_multiprocessors", lambda device: 3)
    x, w, b = operands(53, features + 40, 128 * splits - 72, torch.float16)
    b = b if bias else None
    parts = prefill_parts(x, w, b, splits, PrefillLaunch(16, features, 64, 1, 4, 3, apart))
    assert parts.shape[0] == (splits if apart else 1)
    found = parts.sum(0).half()
    exact = linear_reference(x.double(), w.double(), None if b is None else b.double())
    assert error(found, exact) <= 2 * error(linear_reference(x, w, b), exact)


@pytest.mark.interpreter
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "splits"), [(20, 1), (24, 3)])
def test_tiles_of_two_halves_in_the_interpreter(rows, splits, bias):
    """Tiles of 16 + 4 and 16 + 8 rows, several of them, with remainders of rows and features."""
    x, w, b = operands(53, 40, 128 * splits - 72, torch.float16)
    b = b if bias else None
    found = prefill_parts(x, w, b, splits, PrefillLaunch(rows, 16, 64, 3, 4, 1, True))
    assert found.shape == (splits, 53, 40)
    exact = linear_reference(x.double(), w.double(), None if b is None else b.double())
    assert error(found.float().sum(0).half(), exact) <= 2 * error(linear_reference(x, w, b), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (1000, 2056), (104, 64)])
def test_rows_have_the_bits_of_the_decode_kernel(n, k, dtype):
    """At every number of rows the tiles differ, and whether ranges of K are apart."""
    x, w, b = operands(2100, n, k, dtype, "cuda")
    expected = torch.cat([linear(part, w, b) for part in x[:600].split(100)])
    for rows in (129, 160, 192, 256, 320, 384, 600, 1000, 2100):
        poison("cuda")
        alone = x[:rows].clone()  # no memory after it, as empty_rows leaves it
        for given in (x[:rows], alone):
            total, *parts = prefill_parts(given, w, b)
            for part in parts:
                total = total + part
            assert torch.equal(total.to(dtype)[:600], expected[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [SECOND_RANGE, *(tile._replace(apart=True) for tile in (*PREFILL_TILES, SECOND_RANGE))]
)
def test_every_tile_gives_the_same_bits(tile):
    x, w, b = operands(700, 4096, 4096, torch.bfloat16, "cuda")
    expected = torch.cat([linear(part, w, b) for part in x.split(100)])
    parts = prefill_parts(x, w, b, 2, tile)
    assert torch.equal(parts.sum(0).bfloat16(), expected)


def test_tensor_maps_ask_two_bytes_an_element_and_rows_of_whole_16_bytes():
    x, w, _ = operands(5, 16, 24, torch.float16)
    assert maps_fit(x, w)
    assert maps_fit(x.bfloat16(), w.bfloat16())
    assert not maps_fit(x.float(), w.float())
    assert not maps_fit(x, w[:12])
    assert not maps_fit(x[:, :20].contiguous(), w[:, :20].contiguous())
    assert not maps_fit(x.flatten()[4:100].view(4, 24), w)
    assert not maps_fit(x, w.flatten()[4:196].view(8, 24))
