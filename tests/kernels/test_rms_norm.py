"""RMSNorm and the residual addition before it: values, and the same bits for a row in any company and in any number of parts."""

import pytest
import torch

from headstart.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm
from headstart.tests.kernels.row_by_row import assert_rows_agree

WIDTHS = [7, 48, 200, 1000]


def dtypes(device):
    return [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]


def relative_error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_is_as_exact_as_torchs_own(kernel_device, width):
    for dtype in dtypes(kernel_device):
        torch.manual_seed(width)
        x = (torch.randn(9, width, device=kernel_device) * 3).to(dtype)
        w = torch.rand(width, device=kernel_device).to(dtype)
        wide = x.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
        own = relative_error(rms_norm(x, w, 1e-5), exact)
        assert own <= 2 * relative_error(
            (x * torch.rsqrt(x.float().square().mean(-1, True) + 1e-5)).to(dtype) * w, exact
        )
        assert own > 0 or width < 10  # it is rounded at all


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_addition_rounds_like_the_reference(kernel_device, parts, multiplier):
    for dtype in dtypes(kernel_device):
        torch.manual_seed(parts)
        x = torch.randn(parts, 5, 100, device=kernel_device).to(torch.float32 if parts > 1 else dtype)
        residual, w = (
            torch.randn(5, 100, device=kernel_device).to(dtype),
            torch.rand(100, device=kernel_device).to(dtype),
        )
        normed, total = add_rms_norm(x, residual, w, 1e-5, multiplier)
        expected, expected_total = add_rms_norm_reference(x.cpu(), residual.cpu(), w.cpu(), 1e-5, multiplier)
        assert torch.equal(total.cpu(), expected_total)
        assert relative_error(normed.cpu(), expected.double()) < (1e-6 if dtype == torch.float32 else 3e-3)


def test_four_parts_are_added_in_pairs_where_ranks_added_in_pairs_before(kernel_device):
    torch.manual_seed(0)
    parts, residual = torch.randn(4, 5, 100, device=kernel_device), torch.randn(5, 100, device=kernel_device)
    w = torch.rand(100, device=kernel_device)
    normed, total = add_rms_norm(parts, residual, w, 1e-5, in_pairs=True)
    assert torch.equal(total, residual + ((parts[0] + parts[1]) + (parts[2] + parts[3])))
    assert torch.equal(normed, rms_norm(total, w, 1e-5))
    assert not torch.equal(add_rms_norm(parts, residual, w, 1e-5)[1], total)
    for fewer in (parts[:2], parts[:3]):
        both = [add_rms_norm(fewer, residual, w, 1e-5, in_pairs=pairs)[1] for pairs in (True, False)]
        assert torch.equal(*both)


def test_leading_axes_are_kept(kernel_device):
    x, w = torch.randn(2, 3, 24, device=kernel_device), torch.rand(24, device=kernel_device)
    assert torch.equal(rms_norm(x, w, 1e-5), rms_norm(x.view(6, 24), w, 1e-5).view(2, 3, 24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 62, 512, 1408])
def test_rows_on_the_cpu_do_not_depend_on_each_other(width, dtype):
    x = torch.randn(80, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    w = torch.rand(width, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_rows_agree(lambda rows: rms_norm(rows, w, 1e-5), x)
    assert_rows_agree(lambda rows: add_rms_norm(rows, rows.flip(-1), w, 1e-5)[0], x)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    assert relative_error(rms_norm(x, w, 1e-5), exact) <= (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [31, 100, 4096, 5120, 8192])
def test_a_rows_bits_depend_on_neither_company_nor_parts(width, dtype):
    torch.manual_seed(0)
    w = torch.rand(width, device="cuda").to(dtype)
    residual = torch.randn(2048, width, device="cuda").to(dtype)
    for splits, pairs in ((2, False), (4, False), (4, True)):
        parts = torch.randn(splits, 2048, width, device="cuda")
        normed, total = add_rms_norm(parts, residual, w, 1e-5, in_pairs=pairs)
        first, *others = parts[0::2] + parts[1::2] if pairs else parts
        added = first.clone()
        for part in others:
            added += part
        summed = added.to(dtype)
        assert torch.equal(add_rms_norm(summed, residual, w, 1e-5)[0], normed)
        assert torch.equal(add_rms_norm(summed[None], residual, w, 1e-5)[1], total)
        assert torch.equal(rms_norm(total, w, 1e-5), normed)
        for rows in [*range(1, 65), 257, 1000]:
            for start in (0, 3, 2048 - rows):
                some = slice(start, start + rows)
                given = parts[:, some].contiguous(), residual[some].clone(), w, 1e-5
                few, few_total = add_rms_norm(*given, in_pairs=pairs)
                assert torch.equal(few, normed[some]), (rows, start)
                assert torch.equal(few_total, total[some]), (rows, start)
                assert torch.equal(rms_norm(total[some], w, 1e-5), normed[some])  # a view, at any alignment of rows


def test_shapes_that_do_not_fit_are_refused():
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="add_rms_norm takes"):
        add_rms_norm(torch.randn(2, 4), x, torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match="rms_norm takes"):
        rms_norm(x, torch.ones(4), 1e-5)
