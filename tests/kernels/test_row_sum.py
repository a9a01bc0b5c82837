import pytest
import torch

from headstart.kernels.row_sum import layer_norm, layer_norm_reference, row_softmax, row_sum

WIDTHS = (1, 7, 48, 80, 1000)


def rows(count, width, dtype=torch.float32, seed=0):
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def parameters(width, dtype, device):
    return [rows(1, width, dtype, seed)[0].to(device) for seed in (1, 2)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_those_of_the_formulas(device, width, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("sums in fp32 on a GPU, but for row_sum")
    x, (w, b) = rows(9, width, dtype).to(device), parameters(width, dtype, device)
    exact = x.double()
    wide = torch.promote_types(dtype, torch.float32)
    assert row_sum(x).dtype == row_softmax(x).dtype == wide
    near = dict(rtol=1e-5, atol=1e-4) if wide == torch.float32 else dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(row_sum(x).double(), exact.sum(-1), **near)
    torch.testing.assert_close(row_softmax(x).double(), torch.softmax(exact, -1), **near)
    library = torch.nn.functional.layer_norm(exact, (width,), w.double(), b.double(), 1e-5)
    rough = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    found = layer_norm(x, w, b)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), library, **rough)
    torch.testing.assert_close(
        layer_norm(x).double(), torch.nn.functional.layer_norm(exact, (width,), None, None, 1e-5), **rough
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_in_any_company(device, width):
    x, (w, b) = rows(300, width).to(device), parameters(width, torch.float32, device)
    for op in (row_sum, row_softmax, lambda x: layer_norm(x, w, b), lambda x: layer_norm(x.bfloat16(), w.bfloat16())):
        whole = op(x)
        for start, count in ((0, 1), (299, 1), (17, 7), (100, 64)):
            assert torch.equal(op(x[start : start + count].clone()), whole[start : start + count])


@pytest.mark.gpu
def test_a_row_has_the_same_bits_among_ten_thousand_at_real_widths():
    for width in (4096, 6144):
        x, (w, b) = rows(10_000, width, torch.bfloat16).cuda(), parameters(width, torch.bfloat16, "cuda")
        for op in (row_sum, lambda x: row_softmax(x.float()), lambda x, w=w, b=b: layer_norm(x, w, b)):
            whole = op(x)
            for start, count in ((0, 1), (9_999, 1), (17, 7), (100, 64), (5, 300), (1, 9_000)):
                assert torch.equal(op(x[start : start + count].clone()), whole[start : start + count])


def test_a_reference_that_sums_in_another_order_would_be_seen():
    x = rows(200, 1000)
    in_order = torch.stack([sum(row.tolist(), 0.0) * torch.ones(()) for row in x])
    assert not torch.equal(row_sum(x), in_order)
    assert not torch.equal(layer_norm_reference(x, None, None, 1e-5), torch.nn.functional.layer_norm(x, (1000,)))


def test_shapes_that_do_not_fit_are_refused():
    for op in (row_sum, row_softmax, layer_norm):
        with pytest.raises(ValueError, match=r"takes rows \[M, N\]"):
            op(torch.zeros(2, 3, 4))
        with pytest.raises(ValueError, match=r"takes rows \[M, N\]"):
            op(torch.zeros(2, 0))
    with pytest.raises(ValueError, match=r"layer_norm takes w \[4\]"):
        layer_norm(torch.zeros(2, 4), torch.zeros(5))
    assert row_sum(torch.zeros(0, 4)).shape == (0,)
