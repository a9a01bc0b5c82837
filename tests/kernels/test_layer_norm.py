"""LayerNorm and the residual addition before it: values, and the same bits for a row in any company and in any number of parts."""

import pytest
import torch

from headstart.kernels.jit import INTERPRETED
from headstart.kernels.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm, layer_norm_reference

WIDTHS = (1, 7, 48, 80, 1000)


def rows(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def parameters(width, dtype, device):
    return [rows(width, dtype=dtype, seed=seed).to(device) for seed in (1, 2)]


def dtypes(device):
    return [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_those_of_the_formula(device, width, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("sums in fp32 on a GPU")
    x, (w, b) = rows(9, width, dtype=dtype).to(device), parameters(width, dtype, device)
    exact = x.double()
    library = torch.nn.functional.layer_norm(exact, (width,), w.double(), b.double(), 1e-5)
    rough = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    found = layer_norm(x, w, b)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), library, **rough)
    torch.testing.assert_close(
        layer_norm(x).double(), torch.nn.functional.layer_norm(exact, (width,), None, None, 1e-5), **rough
    )


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_addition_rounds_like_the_reference(kernel_device, parts, biased):
    for dtype in dtypes(kernel_device):
        x = rows(parts, 5, 100, dtype=torch.float32 if parts > 1 else dtype).to(kernel_device)
        residual, (w, b) = rows(5, 100, dtype=dtype, seed=3).to(kernel_device), parameters(100, dtype, kernel_device)
        b = b if biased else None
        normed, total = add_layer_norm(x, residual, w, b)
        given = [None if y is None else y.cpu() for y in (x, residual, w, b)]
        expected, expected_total = add_layer_norm_reference(*given, 1e-5)
        assert torch.equal(total.cpu(), expected_total)
        near = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(normed.cpu(), expected, **near)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_rows_bits_depend_on_neither_company_nor_parts(device, width):
    # The interpreter does not round to bfloat16 as torch does.
    for dtype in (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16):
        parts, residual = rows(3, 150, width).to(device), rows(150, width, dtype=dtype, seed=5).to(device)
        w, b = parameters(width, dtype, device)
        normed, total = add_layer_norm(parts, residual, w, b)
        assert torch.equal(layer_norm(total, w, b), normed)
        summed = (parts[0] + parts[1] + parts[2]).to(dtype)
        assert torch.equal(add_layer_norm(summed, residual, w, b)[0], normed)
        for start, count in ((0, 1), (149, 1), (17, 7), (50, 64)):
            some = slice(start, start + count)
            assert torch.equal(layer_norm(total[some], w, b), normed[some])  # a view, at any alignment of rows
            few, few_total = add_layer_norm(parts[:, some].contiguous(), residual[some].clone(), w, b)
            assert torch.equal(few, normed[some])
            assert torch.equal(few_total, total[some])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 6144])
def test_a_row_has_the_same_bits_among_ten_thousand_at_real_widths(width):
    x, (w, b) = rows(10_000, width, dtype=torch.bfloat16).cuda(), parameters(width, torch.bfloat16, "cuda")
    parts = rows(2, 10_000, width, seed=4).cuda()
    whole, (normed, total) = layer_norm(x, w, b), add_layer_norm(parts, x, w, b)
    assert torch.equal(layer_norm(total, w, b), normed)
    for start, count in ((0, 1), (9_999, 1), (17, 7), (100, 64), (5, 300), (1, 9_000)):
        some = slice(start, start + count)
        assert torch.equal(layer_norm(x[some].clone(), w, b), whole[some])
        assert torch.equal(add_layer_norm(parts[:, some].contiguous(), x[some], w, b)[0], normed[some])


def test_a_reference_that_sums_in_another_order_would_be_seen():
    x = rows(200, 1000)
    assert not torch.equal(layer_norm_reference(x, None, None, 1e-5), torch.nn.functional.layer_norm(x, (1000,)))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"takes rows \[M, N\]"):
        layer_norm(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"layer_norm takes w \[4\]"):
        layer_norm(torch.zeros(2, 4), torch.zeros(5))
    with pytest.raises(ValueError, match="add_layer_norm takes x"):
        add_layer_norm(torch.zeros(2, 5), torch.zeros(2, 4))
