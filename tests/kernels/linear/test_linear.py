"""linear and linear_parts: the formula by value, and a row's bits whatever the other rows are."""

import pytest
import torch

from headstart.kernels.linear.linear import (
    add_parts,
    linear,
    linear_parts,
    linear_reference,
    linear_sums,
    num_splits,
    split_depth,
)
from headstart.tests.kernels.linear.products import GPU_DTYPES, assert_captured, dtypes_of, error, operands, poison
from headstart.tests.kernels.row_by_row import assert_rows_agree

ODD_SHAPES = [(97, 129), (33, 7), (1, 1), (64, 2048), (130, 2050), (96, 4100)]


@pytest.mark.parametrize(("n", "k"), ODD_SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 15, 17, 65])
def test_linear_computes_its_formula_at_odd_shapes(kernel_device, n, k, rows):
    if kernel_device == "cpu" and k > 200 and rows in ((2, 15) if k < 4000 else (2, 15, 17, 65)):
        pytest.skip("one row and two blocks of rows are enough for the interpreter's pace")
    for dtype in dtypes_of(kernel_device):
        x, w, b = operands(rows, n, k, dtype, kernel_device)
        for bias in (b, None) if kernel_device == "cuda" or k < 200 else (b,):
            exact = linear_reference(x.double(), w.double(), None if bias is None else bias.double())
            poison(kernel_device)
            found = linear(x, w, bias)
            assert found.dtype == dtype
            assert found.shape == (rows, n)
            # float32: where the library's error is that of the rounding alone, a few sums may round otherwise.
            library = error(linear_reference(x, w, bias), exact)
            assert error(found, exact) <= 2 * library + (1e-7 if dtype == torch.float32 else 0)


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [5, 70, 120])
def test_tensor_maps_in_the_interpreter(rows):
    """In one half and in two; float16 as maps ask it."""
    x, w, b = operands(rows, 72, 136, torch.float16)
    exact = linear_reference(x.double(), w.double(), b.double())
    assert error(linear(x, w, b), exact) <= 2 * error(linear_reference(x, w, b), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize(("n", "k"), [(97, 129), (200, 2056), (6144, 4096), (33, 7)])
@pytest.mark.parametrize("rows", [80, 100, 129, 256, 257, 1000])
def test_linear_computes_its_formula_for_many_rows(n, k, rows, dtype):
    x, w, b = operands(rows, n, k, dtype, "cuda")
    exact = linear_reference(x.double(), w.double(), b.double())
    poison("cuda")
    assert error(linear(x, w, b), exact) <= 2 * error(linear_reference(x, w, b), exact) + (
        1e-7 if dtype == torch.float32 else 0
    )


@pytest.mark.parametrize(("n", "k"), [(97, 129), (130, 2050), (96, 4100)])
def test_parts_added_in_order_are_the_product(kernel_device, n, k):
    for dtype in dtypes_of(kernel_device):
        x, w, b = operands(5, n, k, dtype, kernel_device)
        parts = linear_parts(x, w, b)
        assert parts.shape == (num_splits(n, k), 5, n)
        assert parts.dtype == (dtype if parts.shape[0] == 1 else torch.float32)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        assert torch.equal(total.to(dtype), linear(x, w, b))


def assert_devices_compute_the_product(rows, n, k, dtype, device):
    """Ranges of K on several devices, and features on several devices, are the bits of the whole product on one."""
    x, w, b = operands(rows, n, k, dtype, device)
    whole, splits = linear(x, w, b), num_splits(n, k)
    borders = range(0, k, split_depth(k, splits))
    assert len(borders) == splits > 1
    ranges = [(x[:, at : at + borders.step], w[:, at : at + borders.step].contiguous()) for at in borders]
    poison(device)
    sums = [linear_sums(*operands, None if i else b) for i, operands in enumerate(ranges)]
    assert {part.dtype for part in sums} == {torch.float32}
    assert torch.equal(add_parts(torch.stack(sums), dtype), whole)
    half = n // 2 // 16 * 16
    for own in (slice(0, half), slice(half, n)):
        assert torch.equal(linear(x, w[own].contiguous(), b[own].contiguous(), splits=splits), whole[:, own])


@pytest.mark.interpreter
def test_devices_compute_the_product_of_one_in_the_interpreter():
    assert_devices_compute_the_product(5, 48, 4100, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 14336), (1000, 4104)])
def test_devices_compute_the_product_of_one(n, k, dtype):
    for rows in (1, 16, 64, 80, 128, 129, 320, 1000, 2048):
        assert_devices_compute_the_product(rows, n, k, dtype, "cuda")


def test_sums_of_a_range_are_wide_on_the_cpu():
    x, w, b = operands(3, 40, 24, torch.bfloat16)
    assert linear_sums(x, w).dtype == torch.float32
    assert torch.equal(linear_sums(x, w, b), linear(x.float(), w.float(), b.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(97, 48), (512, 256), (33, 129), (1, 7)])
def test_rows_on_the_cpu_do_not_depend_on_each_other(n, k, dtype):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(80, k, generator=generator).to(dtype)
    w, b = torch.randn(n, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    assert_rows_agree(lambda rows: linear(rows, w, b), x)
    exact = x.double() @ w.double().T + b.double()
    own = (linear(x, w, b).double() - exact).norm() / exact.norm()
    library = (torch.nn.functional.linear(x, w, b).double() - exact).norm() / exact.norm()
    assert own <= 2 * library + 1e-9


ROW_COUNTS = (*range(2, 65), 65, 80, 81, 96, 97, 100, 128, 200, 256, 257, 300, 1000, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (4096, 14336), (1000, 2056), (97, 129)])
def test_a_row_has_the_same_bits_alone_and_in_any_company(n, k, dtype):
    x, w, b = operands(2048, n, k, dtype, "cuda")
    alone = torch.cat([linear(x[row : row + 1], w, b) for row in range(64)])
    for rows in ROW_COUNTS:
        # The rows stand at the end, so that they move through every place of a tile.
        company = torch.cat((x[64 : 64 + rows - min(rows, 64)], x[: min(rows, 64)]))
        assert torch.equal(linear(company, w, b)[-min(rows, 64) :], alone[: min(rows, 64)]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_eight_thousand_rows_are_those_of_one(dtype):
    x, w, b = operands(8192, 1000, 520, dtype, "cuda")
    for rows in (4097, 8191, 8192):
        found = linear(x[:rows], w, b)
        for row in (0, 1, 255, 256, 4000, 4096, rows - 1):
            assert torch.equal(found[row], linear(x[row : row + 1], w, b)[0]), (rows, row)


@pytest.mark.gpu
def test_a_library_product_does_not_keep_the_bits():
    """The control: what the tests above assert is not true of torch.matmul."""

    def differs(n, k):
        x, w, _ = operands(64, n, k, torch.bfloat16, "cuda")
        alone = torch.cat([x[row : row + 1] @ w.T for row in range(64)])
        return not torch.equal(alone, x @ w.T)

    assert any(differs(n, k) for n, k in ((4096, 4096), (4096, 14336), (6144, 4096)))


@pytest.mark.gpu
def test_it_runs_inside_a_captured_graph():
    x, w, b = operands(300, 1024, 4096, torch.bfloat16, "cuda")
    for rows in (1, 64, 300):
        assert_captured(lambda rows=rows: linear(x[:rows], w, b))


def test_no_rows_give_no_rows(kernel_device):
    x, w, b = operands(0, 5, 7, device=kernel_device)
    assert linear(x, w, b).shape == (0, 5)


def test_operands_that_do_not_fit_are_refused(kernel_device):
    x, w, b = operands(2, 6, 8, device=kernel_device)
    for op in (linear, linear_parts):
        with pytest.raises(ValueError, match="takes x"):
            op(x[:, :5], w, b)
        with pytest.raises(ValueError, match="takes x"):
            op(x[0], w, b)
        with pytest.raises(ValueError, match="takes b"):
            op(x, w, b[:4])
        with pytest.raises(ValueError, match="alike"):
            op(x, w.double())
        with pytest.raises(ValueError, match="contiguous"):
            op(x, operands(2, 8, 6, device=kernel_device)[1].T)
