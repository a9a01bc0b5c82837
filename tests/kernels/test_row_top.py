import pytest
import torch

from headstart.kernels.row_top import row_top, row_top_reference


@pytest.mark.parametrize(("width", "k"), [(1, 1), (5, 3), (8, 2), (60, 8), (128, 8), (1000, 4)])
def test_the_greatest_are_those_of_a_stable_sort(kernel_device, width, k):
    x = torch.randn(50, width, generator=torch.Generator().manual_seed(width))
    for dtype in [torch.float32] + [torch.bfloat16, torch.float16] * (kernel_device == "cuda"):
        for given in (x, x.round(), torch.zeros_like(x), torch.where(x > 0.5, x, float("-inf"))):
            rows = given.to(kernel_device, dtype)
            values, places = row_top(rows, k)
            expected, expected_places = row_top_reference(given.to(dtype), k)
            assert torch.equal(values.cpu(), expected)
            assert torch.equal(places.cpu(), expected_places)
            assert torch.equal(row_top(rows[7:8], k)[1], places[7:8])


def test_nan_counts_as_inf_and_no_place_is_outside(kernel_device):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, 2.0, inf], [inf, 1.0, nan, -inf], [nan] * 4, [nan, -inf, -inf, 0.0]])
    for top, rows in ((row_top, x.to(kernel_device)), (row_top_reference, x), (row_top_reference, x.double())):
        values, places = top(rows, 3)
        assert places.tolist() == [[1, 3, 2], [0, 2, 1], [0, 1, 2], [0, 3, 1]]
        assert values.isnan().tolist() == [[True, False, False], [False, True, False], [True] * 3, [True, False, False]]


@pytest.mark.parametrize(("row", "first"), [([float("inf"), float("nan")], 0), ([float("nan"), float("inf")], 0)])
def test_of_nan_and_inf_the_lower_place_is_the_first(kernel_device, row, first):
    for x in (torch.tensor([row]), torch.tensor([row]).to(kernel_device)):
        assert row_top(x, 1)[1].tolist() == row_top_reference(x, 1)[1].tolist() == [[first]]


def test_what_does_not_fit_is_refused():
    for x, k in ((torch.zeros(2, 3, 4), 1), (torch.zeros(2, 3), 4), (torch.zeros(2, 3), 0)):
        with pytest.raises(ValueError, match="row_top takes rows"):
            row_top(x, k)
    assert row_top(torch.zeros(0, 3), 2)[0].shape == (0, 2)
