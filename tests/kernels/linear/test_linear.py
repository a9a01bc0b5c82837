"""linear, linear_parts, gate_up_silu: the formula by value, and a row's bits whatever the other rows are."""

import pytest
import torch

from headstart.kernels.linear.gated_mlp import gate_up_silu, gate_up_silu_reference
from headstart.kernels.linear.linear import linear, linear_parts, linear_reference, num_splits
from headstart.kernels.linear.linear_table import (
    DECODE,
    GATED_DECODE,
    ROW_TILES,
    SPLIT_ALIGNMENT,
    SPLITS,
    decode_launch,
    gated_launch,
    split_depth,
    tile_rows,
)
from headstart.kernels.silu_mul import silu_mul, silu_mul_apart, silu_mul_reference

GPU_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ODD_SHAPES = [(97, 129), (33, 7), (1, 1), (64, 2048), (130, 2050), (96, 4100)]


def operands(rows, n, k, dtype=torch.float32, device="cpu", seed=0):
    """x [rows, k], w [n, k] of rows with norm about 1, b [n], the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    w = torch.randn(n, k, generator=generator) / k**0.5
    b = torch.randn(n, generator=generator)
    return tuple(t.to(device, dtype) for t in (x, w, b))


def dtypes_of(device):
    """The interpreter computes bfloat16 products wrongly; float32 shows masks and addresses."""
    return GPU_DTYPES if device == "cuda" else [torch.float32]


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def poison(device):
    """Fills freed memory of the usual sizes with NaN, so that an output that nobody wrote shows."""
    if device == "cuda":
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            torch.full((size,), float("nan"), device=device)


@pytest.mark.parametrize(("n", "k"), ODD_SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 15, 17, 65])
def test_linear_computes_its_formula_at_odd_shapes(kernel_device, n, k, rows):
    if kernel_device == "cpu" and rows in (2, 15) and k > 200:
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


@pytest.mark.parametrize(("width", "k"), [(97, 129), (33, 7), (65, 64)])
@pytest.mark.parametrize("rows", [1, 17, 65])
def test_gate_up_silu_is_linear_then_silu_mul(kernel_device, width, k, rows):
    for dtype in dtypes_of(kernel_device):
        x, w, b = operands(rows, 2 * width, k, dtype, kernel_device)
        for bias in (b, None):
            poison(kernel_device)
            found = gate_up_silu(x, w, bias)
            apart = silu_mul(linear(x, w, bias))
            if kernel_device == "cuda":
                assert torch.equal(found, apart)
            else:  # the interpreter's products are numpy's, whose order of sums is the processor's affair
                torch.testing.assert_close(found, apart)
            exact = gate_up_silu_reference(x.double(), w.double(), None if bias is None else bias.double())
            library = error(gate_up_silu_reference(x, w, bias), exact)
            assert error(found, exact) <= 2 * library + (1e-7 if dtype == torch.float32 else 0)


def test_silu_mul_computes_its_formula(kernel_device):
    for dtype in dtypes_of(kernel_device):
        x = 4 * torch.randn(5, 2 * 1027, generator=torch.Generator().manual_seed(0)).to(kernel_device, dtype)
        exact = silu_mul_reference(x.double())
        assert error(silu_mul(x), exact) <= 2 * error(silu_mul_reference(x), exact) + 1e-7
        gate, up = x.chunk(2, -1)
        assert torch.equal(silu_mul_apart(gate, up.contiguous()), silu_mul(x))


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "k"), [(14336, 4096), (6000, 520), (97, 129), (104, 64), (100, 64)])
def test_gate_up_silu_has_the_same_bits_for_any_number_of_rows(width, k, dtype):
    x, w, b = operands(2048, 2 * width, k, dtype, "cuda")
    alone = torch.cat([gate_up_silu(x[row : row + 1], w, b) for row in range(16)])
    for rows in (2, 16, 17, 33, 65, 80, 90, 96, 100, 129, 200, 256, 257, 1000, 2048):
        found = gate_up_silu(x[:rows], w, b)
        assert torch.equal(found[: min(rows, 16)], alone[: min(rows, 16)]), rows
        assert torch.equal(found, silu_mul(linear(x[:rows], w, b))), rows


@pytest.mark.gpu
def test_a_library_product_does_not_keep_the_bits():
    """The control: what the tests above assert is not true of torch.matmul."""

    def differs(n, k):
        x, w, _ = operands(64, n, k, torch.bfloat16, "cuda")
        alone = torch.cat([x[row : row + 1] @ w.T for row in range(64)])
        return not torch.equal(alone, x @ w.T)

    assert any(differs(n, k) for n, k in ((4096, 4096), (4096, 14336), (6144, 4096)))


@pytest.mark.gpu
def test_products_run_inside_a_captured_graph():
    x, w, b = operands(300, 1024, 4096, torch.bfloat16, "cuda")
    gate = operands(300, 2048, 4096, torch.bfloat16, "cuda", seed=1)[1]
    for rows in (1, 64, 300):
        expected = linear(x[:rows], w, b), gate_up_silu(x[:rows], gate)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = linear(x[:rows], w, b), gate_up_silu(x[:rows], gate)
        for result in found:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_every_launch_of_the_tables_fits_and_ends_with_a_range_of_k():
    launches = [(launch, rows, 1) for by_rows in DECODE.values() for rows, launch in by_rows.items()]
    launches += [(launch, rows, 2) for by_rows in GATED_DECODE.values() for rows, launch in by_rows.items()]
    for n, k in (*SPLITS, (1, 1), (300, 20000), (1 << 20, 8192)):
        for rows in ROW_TILES:
            launches += [(decode_launch(n, k, rows), rows, 1), (gated_launch(n, k, rows), rows, 2)]
        assert num_splits(n, k) == 1 or split_depth(k, num_splits(n, k)) * (num_splits(n, k) - 1) < k
    for launch, rows, operands in launches:
        assert SPLIT_ALIGNMENT % launch.depth == 0
        assert (launch.features * operands + rows) * launch.depth * 2 * launch.stages < 227 << 10


@pytest.mark.parametrize(
    ("count", "rows"), [(1, 16), (16, 16), (17, 32), (65, 80), (81, 96), (97, 128), (256, 256), (5000, 256)]
)
def test_a_row_tile_is_the_narrowest_that_holds_the_rows(count, rows):
    assert tile_rows(count) == rows


def test_no_rows_give_no_rows(kernel_device):
    x, w, b = operands(0, 5, 7, device=kernel_device)
    assert linear(x, w, b).shape == (0, 5)


def test_operands_that_do_not_fit_are_refused(kernel_device):
    x, w, b = operands(2, 6, 8, device=kernel_device)
    for op in (linear, linear_parts, gate_up_silu):
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
    with pytest.raises(ValueError, match="gate rows then up rows"):
        gate_up_silu(x, w[:5])
    with pytest.raises(ValueError, match="odd width"):
        silu_mul(x[:, :5])
    with pytest.raises(ValueError, match="one shape and dtype"):
        silu_mul_apart(x, x[:1])
