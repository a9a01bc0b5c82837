"""The products of many rows: values in small tiles, and the bits of the decode kernel."""

import pytest
import torch

from headstart.kernels.linear import linear_prefill
from headstart.kernels.linear.linear import decode_parts, linear_reference
from headstart.kernels.linear.linear_prefill import maps_fit, prefill_linear
from headstart.kernels.linear.linear_table import PrefillLaunch
from headstart.tests.kernels.linear.products import error, operands, poison


@pytest.mark.interpreter
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("splits", "features"), [(1, 128), (1, 256), (1, 512), (2, 64), (2, 128), (3, 256)])
def test_values_in_the_interpreter(monkeypatch, splits, features, bias):
    """Several programs, each of several tiles, in one, two and four pieces, with remainders of rows, features and depth."""
    monkeypatch.setattr(linear_prefill, "num_multiprocessors", lambda device: 3)
    x, w, b = operands(53, features + 40, 128 * splits - 72, torch.float16)
    b = b if bias else None
    found = prefill_linear(x, w, b, splits, PrefillLaunch(16, features, 64, 1, 4, 3))
    exact = linear_reference(x.double(), w.double(), None if b is None else b.double())
    assert error(found, exact) <= 2 * error(linear_reference(x, w, b), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (1000, 2056), (104, 64)])
def test_rows_have_the_bits_of_the_decode_kernel(n, k, dtype):
    x, w, b = operands(600, n, k, dtype, "cuda")
    poison("cuda")
    found = prefill_linear(x, w, b)
    for rows in (1, 17, 80, 256):
        total, *parts = decode_parts(x[-rows:], w, b)
        for part in parts:
            total = total + part
        assert torch.equal(total.to(dtype), found[-rows:]), rows


def test_tensor_maps_ask_two_bytes_an_element_and_rows_of_whole_16_bytes():
    x, w, _ = operands(5, 16, 24, torch.float16)
    assert maps_fit(x, w)
    assert maps_fit(x.bfloat16(), w.bfloat16())
    assert not maps_fit(x.float(), w.float())
    assert not maps_fit(x, w[:12])
    assert not maps_fit(x[:, :20].contiguous(), w[:, :20].contiguous())
    assert not maps_fit(x.flatten()[4:100].view(4, 24), w)
    assert not maps_fit(x, w.flatten()[4:196].view(8, 24))
