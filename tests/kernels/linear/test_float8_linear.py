"""Products with weights of 8 bits: every code, values against the widened weight, the same bits for a row in any company."""

from unittest import mock

import pytest
import torch

from headstart.kernels.linear import float8_linear as float8_module
from headstart.kernels.linear.float8_linear import (
    Float8Weight,
    float8_gate_up_silu,
    float8_launch,
    float8_linear,
    float8_linear_reference,
    float8_parts,
    prefers_thread_order,
    to_columns,
    to_threads,
)
from headstart.kernels.linear.linear_table import num_splits
from headstart.kernels.shared_memory import H200
from headstart.kernels.silu_mul import silu_mul
from headstart.tests.kernels.linear.products import assert_captured, error, operands, poison


def halves_of(device):
    """The dtypes of rows; the interpreter computes bfloat16 products wrongly."""
    return [torch.bfloat16, torch.float16] if device == "cuda" else [torch.float16]


def float8_operands(rows, n, k, dtype, device, by_thread=None):
    """by_thread: an order of codes, if K allows it; None: the device's own"""
    x, w, b = operands(rows, n, k, dtype, device)
    with mock.patch.object(float8_module, "prefers_thread_order", _order(by_thread)):
        return x, Float8Weight.of(w), b


def _order(by_thread):
    return prefers_thread_order if by_thread is None else lambda _, k: by_thread and k % 16 == 0


def test_a_weight_becomes_its_nearest_codes():
    torch.manual_seed(0)
    weight = torch.randn(9000, 24) * torch.logspace(-6, 3, 9000)[:, None]
    weight[7] = 0
    found = Float8Weight.of(weight)
    assert found.shape == (9000, 24)
    assert found.nbytes == 9000 * (24 + 4)
    values = found.widened(torch.float32)
    assert torch.equal(values[7], torch.zeros(24))
    # 3 bits of mantissa; below 2^-6 of e4m3, steps of 2^-9.
    largest = weight.abs().amax(1, keepdim=True)
    assert ((values - weight).abs() <= torch.maximum(weight.abs() / 16, largest / 448 * 2**-10) * 1.0001).all()
    torch.testing.assert_close(values.abs().amax(1), largest[:, 0], rtol=1e-6, atol=0)
    parameter = torch.nn.Parameter(weight.clone())
    kept = Float8Weight.of(parameter)
    assert torch.equal(kept.codes, found.codes)
    assert not kept.scale.requires_grad  # its graph would keep the weight


def test_codes_lie_in_the_order_of_threads():
    codes = torch.arange(64, dtype=torch.uint8).view(2, 32)
    found = to_threads(codes)
    assert found[1, :16].tolist() == [32 + k for k in (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)]
    assert torch.equal(to_columns(found), codes)


def test_every_code_is_its_value(kernel_device):
    """A row that holds a single 1 reads one code: exact, subnormal codes and both signs included."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(17, 1)
    codes[:, [0x7F, 0xFF]] = 0x80  # NaN; and minus zero
    scale = 2.0 ** torch.arange(-8, 9)
    for dtype in halves_of(kernel_device):
        for order, by_thread in ((codes, False), (to_threads(codes), True)):
            weight = Float8Weight(order.to(kernel_device), scale.to(kernel_device), by_thread)
            found = float8_linear(torch.eye(256, dtype=dtype, device=kernel_device), weight)
            assert torch.equal(found.cpu(), weight.widened(dtype).cpu().T)
            assert torch.equal(found.cpu(), Float8Weight(codes, scale).widened(dtype).T)


@pytest.mark.parametrize(
    ("n", "k", "by_thread"),
    [(97, 128, False), (97, 128, True), (40, 130, False), (33, 7, False), (24, 4112, False), (24, 4112, True)],
)
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_values_are_those_of_the_widened_weight(kernel_device, n, k, by_thread, rows):
    for dtype in halves_of(kernel_device):
        x, w, b = float8_operands(rows, 2 * n, k, dtype, kernel_device, by_thread)
        assert w.by_thread == by_thread
        for bias in (b, None):
            exact_bias = None if bias is None else bias.double()
            exact = float8_linear_reference(x.double(), w, exact_bias)
            poison(kernel_device)
            found = float8_linear(x, w, bias)
            assert error(found, exact) <= 1.5 * error(exact.to(dtype), exact)
            parts = float8_parts(x, w, bias)
            assert parts.shape == (num_splits(2 * n, k), rows, 2 * n)
            assert error(parts.double().sum(0), exact) <= 1.5 * error(exact.to(dtype), exact)
            poison(kernel_device)
            gated = float8_gate_up_silu(x, w, bias)
            gate, up = found.double().chunk(2, 1)
            assert error(gated, gate / (1 + (-gate).exp()) * up) <= 3 * error(exact.to(dtype), exact)


@pytest.mark.parametrize("by_thread", [False, True])
def test_rows_that_tensor_maps_cannot_describe(kernel_device, by_thread):
    for dtype in halves_of(kernel_device):
        x, w, b = float8_operands(17, 96, 4112, dtype, kernel_device, by_thread)
        odd = torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)
        assert odd.data_ptr() % 16
        exact = float8_linear_reference(x.double(), w, b.double())
        found = float8_linear(odd, w, b)
        assert error(found, exact) <= 1.5 * error(exact.to(dtype), exact)
        assert torch.equal(float8_gate_up_silu(odd, w, b), silu_mul(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_widened_weight_is_multiplied(dtype):
    x, w, b = float8_operands(5, 48, 40, dtype, "cpu")
    expected = torch.nn.functional.linear(x, w.widened(dtype), b)
    assert torch.equal(float8_linear(x, w, b), expected)
    assert torch.equal(float8_parts(x, w, b), expected[None])
    assert torch.equal(float8_gate_up_silu(x, w, b), silu_mul(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (4096, 4096), (1000, 520), (98, 129)])
def test_a_rows_bits_do_not_depend_on_the_others(n, k, dtype):
    x, w, b = float8_operands(512, n, k, dtype, "cuda")
    whole, gated = float8_linear(x, w, b), float8_gate_up_silu(x, w, b)
    assert torch.equal(gated, silu_mul(whole))
    for rows in (1, 2, 16, 17, 33, 64, 65, 128, 129, 300):
        for start in (0, 512 - rows):
            some = x[start : start + rows]
            assert torch.equal(float8_linear(some, w, b), whole[start : start + rows]), (rows, start)
            assert torch.equal(float8_gate_up_silu(some, w, b), gated[start : start + rows]), (rows, start)


@pytest.mark.gpu
def test_small_rows_lose_no_precision():
    """Products are 2^-120 too small in bfloat16 until the scale comes."""
    x, w, _ = float8_operands(64, 512, 4096, torch.bfloat16, "cuda")
    x = x * 1e-6
    exact = float8_linear_reference(x.double(), w)
    assert error(float8_linear(x, w), exact) <= 1.5 * error(exact.bfloat16(), exact)


@pytest.mark.gpu
def test_it_writes_where_it_is_told_and_runs_in_a_graph():
    x, w, _ = float8_operands(64, 512, 4096, torch.bfloat16, "cuda")
    wide = Float8Weight(w.codes.repeat(64, 1), w.scale.repeat(64), w.by_thread)
    out = torch.full((64, 64 * 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert float8_linear(x, wide, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :512], out[:, -512:])
    assert_captured(lambda: float8_linear(x, w))
    assert_captured(lambda: float8_gate_up_silu(x, w))


def test_launches_fit_an_h200():
    for n, k, gated in ((128256, 4096, False), (14336, 4096, True), (4096, 14336, False), (4096, 4096, False)):
        for rows in (16, 32, 64, 128):
            launch = float8_launch(n, k, num_splits(n * (1 + gated), k), rows, H200, gated)
            assert launch.stages >= 2
            assert launch.stages * launch.depth * (launch.features * (1 + gated) + 2 * rows) < H200.size


@pytest.mark.parametrize(
    ("gpu", "dtype"), [("H200", torch.bfloat16), ("H200", torch.float16), ("RTX 4090", torch.bfloat16)]
)
def test_launches_compile_and_fit_on_gpus_that_are_not_there(gpu, dtype):
    pytest.importorskip("triton")
    from headstart.benchmarks.proofs.absent_gpu import GPUS, AbsentGpu

    with AbsentGpu(GPUS[gpu]) as absent:
        codes = torch.empty(32000, 1024, dtype=torch.uint8, device="cuda")
        scale, x = (
            torch.empty(*size, dtype=kind, device="cuda")
            for size, kind in (((32000,), torch.float32), ((64, 1024), dtype))
        )
        by_thread = prefers_thread_order(codes.device, 1024)
        for order in (by_thread, not by_thread):
            float8_linear(x, Float8Weight(codes, scale, order))
            float8_gate_up_silu(x, Float8Weight(codes[:16384], scale[:16384], order))
    launches = [launch.compile() for launch in absent.launches if launch.name.startswith("float8")]
    assert len(launches) == 4
    for launch, in_order in zip(launches, (True, True, False, False)):
        assert launch.metadata.shared <= GPUS[gpu].shared_memory
        ptx = [line for line in launch.asm["ptx"].splitlines() if ".trans" not in line]  # rows are loaded transposed
        assert any("ldmatrix" in line for line in ptx) == in_order
        assert any("ld.shared.v2.b8" in line for line in ptx) != in_order  # codes in the wrong order, two at a time


def test_what_does_not_fit_is_refused(kernel_device):
    x, w, _ = float8_operands(2, 6, 32, torch.float16, kernel_device)
    with pytest.raises(ValueError, match="takes x"):
        float8_linear(x[:, :5], w)
    with pytest.raises(ValueError, match="gate rows then up rows"):
        float8_gate_up_silu(x, Float8Weight(w.codes[:5], w.scale[:5], w.by_thread))
    with pytest.raises(ValueError, match="takes rows in bfloat16 or float16 on a GPU, got torch"):
        float8_linear(x.float(), w)
