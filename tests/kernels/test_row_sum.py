import pytest
import torch

from headstart.kernels.row_sum import row_softmax, row_sum

WIDTHS = (1, 7, 48, 80, 1000)


def rows(count, width, dtype=torch.float32, seed=0):
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_those_of_the_formulas(device, width, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("sums in fp32 on a GPU, but for row_sum")
    x = rows(9, width, dtype).to(device)
    exact = x.double()
    wide = torch.promote_types(dtype, torch.float32)
    assert row_sum(x).dtype == row_softmax(x).dtype == wide
    near = dict(rtol=1e-5, atol=1e-4) if wide == torch.float32 else dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(row_sum(x).double(), exact.sum(-1), **near)
    torch.testing.assert_close(row_softmax(x).double(), torch.softmax(exact, -1), **near)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_in_any_company(device, width):
    x = rows(300, width).to(device)
    for op in (row_sum, row_softmax):
        whole = op(x)
        for start, count in ((0, 1), (299, 1), (17, 7), (100, 64)):
            assert torch.equal(op(x[start : start + count].clone()), whole[start : start + count])


@pytest.mark.gpu
def test_a_row_has_the_same_bits_among_ten_thousand_at_real_widths():
    for width in (4096, 6144):
        x = rows(10_000, width, torch.bfloat16).cuda()
        for op in (row_sum, lambda x: row_softmax(x.float())):
            whole = op(x)
            for start, count in ((0, 1), (9_999, 1), (17, 7), (100, 64), (5, 300), (1, 9_000)):
                assert torch.equal(op(x[start : start + count].clone()), whole[start : start + count])


def test_a_reference_that_sums_in_another_order_would_be_seen():
    x = rows(200, 1000)
    in_order = torch.stack([sum(row.tolist(), 0.0) * torch.ones(()) for row in x])
    assert not torch.equal(row_sum(x), in_order)


def test_shapes_that_do_not_fit_are_refused():
    for op in (row_sum, row_softmax):
        with pytest.raises(ValueError, match=r"takes rows \[M, N\]"):
            op(torch.zeros(2, 3, 4))
        with pytest.raises(ValueError, match=r"takes rows \[M, N\]"):
            op(torch.zeros(2, 0))
    assert row_sum(torch.zeros(0, 4)).shape == (0,)
