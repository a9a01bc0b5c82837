"""gate_up_silu: linear, then silu_mul, by value and bit by bit, whichever kernel computes it."""

import pytest
import torch

from headstart.kernels.linear import gated_mlp
from headstart.kernels.linear.gated_mlp import gate_up_silu, gate_up_silu_reference
from headstart.kernels.linear.linear import linear
from headstart.kernels.linear.linear_table import PrefillLaunch, num_splits
from headstart.kernels.silu_mul import silu_mul
from headstart.tests.kernels.linear.products import assert_captured, dtypes_of, error, operands, poison


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


def test_the_first_half_of_the_weights_is_the_gate(device):
    """Against torch's own in fp64, where the two cannot be exchanged; in ranges of K too."""
    for width, k in ((33, 7), (48, 4100)):
        x, w, b = operands(3, 2 * width, k, device=device)
        gate, up = (x.double() @ w.double().T + b.double()).chunk(2, -1)
        found = gate_up_silu(x, w, b)
        assert found.shape == (3, width)
        assert error(found, torch.nn.functional.silu(gate) * up) <= 1e-6
    assert num_splits(2 * 48, 4100) > 1


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [5, 70, 120])
def test_tensor_maps_in_the_interpreter(rows):
    """In one half and in two; float16 as maps ask it."""
    x, w, b = operands(rows, 2 * 72, 136, torch.float16)
    exact = gate_up_silu_reference(x.double(), w.double(), b.double())
    assert error(gate_up_silu(x, w, b), exact) <= 2 * error(gate_up_silu_reference(x, w, b), exact)


@pytest.mark.interpreter
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [16, 20, 24])
def test_large_tiles_in_the_interpreter(monkeypatch, rows, bias):
    """Several programs, each of several tiles, tiles of two halves, and remainders of rows, features and depth."""
    monkeypatch.setattr(gated_mlp, "DECODE_ROWS", 4)
    monkeypatch.setattr(gated_mlp, "num_multiprocessors", lambda device: 3)
    x, w, b = operands(37, 2 * 40, 56, torch.float16)
    b = b if bias else None
    found = gate_up_silu(x, w, b, launch=PrefillLaunch(rows, 16, 32, 1, 4, 2))
    exact = gate_up_silu_reference(x.double(), w.double(), None if b is None else b.double())
    assert error(found, exact) <= 2 * error(gate_up_silu_reference(x, w, b), exact)


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
def test_it_runs_inside_a_captured_graph():
    x, w, _ = operands(300, 2048, 4096, torch.bfloat16, "cuda", seed=1)
    for rows in (1, 64, 300):
        assert_captured(lambda rows=rows: gate_up_silu(x[:rows], w))


def test_no_rows_give_no_rows(kernel_device):
    x, w, b = operands(0, 6, 7, device=kernel_device)
    assert gate_up_silu(x, w, b).shape == (0, 3)


def test_operands_that_do_not_fit_are_refused(kernel_device):
    x, w, b = operands(2, 6, 8, device=kernel_device)
    with pytest.raises(ValueError, match="gate_up_silu takes x"):
        gate_up_silu(x[:, :5], w, b)
    with pytest.raises(ValueError, match="gate_up_silu takes x"):
        gate_up_silu(x[0], w, b)
    with pytest.raises(ValueError, match="takes b"):
        gate_up_silu(x, w, b[:4])
    with pytest.raises(ValueError, match="alike"):
        gate_up_silu(x, w.double())
    with pytest.raises(ValueError, match="contiguous"):
        gate_up_silu(x, operands(2, 8, 6, device=kernel_device)[1].T)
    with pytest.raises(ValueError, match="gate rows then up rows"):
        gate_up_silu(x, w[:5])
