"""The warp-specialised products: the bits of the kernels that they replace, and, without a GPU, what the compiler makes of them."""

import re
import subprocess

import pytest
import torch

pytest.importorskip("triton")
import triton

from headstart.benchmarks.proofs.absent_gpu import GPUS, AbsentGpu
from headstart.kernels.linear import linear_table
from headstart.kernels.linear.gated_mlp import gate_up_silu
from headstart.kernels.linear.linear import add_parts, empty_rows, linear, prefill_parts
from headstart.kernels.linear.linear_prefill import prefill_linear
from headstart.kernels.linear.linear_specialised import can_specialise
from headstart.kernels.linear.linear_table import SECOND_RANGE, SPECIALISED_TILES, PrefillLaunch, num_splits
from headstart.kernels.silu_mul import silu_mul
from headstart.tests.kernels.linear.products import assert_captured, operands, poison

WIDE, NARROW = SPECIALISED_TILES  # 128 x 256 and 192 x 192
GATED = WIDE._replace(features=WIDE.features // 2)
PLAIN = PrefillLaunch(128, 256, 64, 4, 8, 16)
ROWS = (65, 1000, 1024, 1152, 1407, 2048)
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("gpu", GPUS)
def test_it_is_for_compute_capability_9(gpu):
    with AbsentGpu(GPUS[gpu]):
        assert can_specialise(torch.device("cuda", 0)) == (GPUS[gpu].capability[0] == 9)
        assert not can_specialise(torch.device("cpu"))


@pytest.mark.parametrize(("version", "known"), [("3.6.0", True), ("3.7.1", True), ("3.5.1", False), ("3.8.0", False)])
def test_it_is_for_versions_of_triton_that_compile_it(version, known, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    with AbsentGpu(GPUS["H200"]):
        assert can_specialise(torch.device("cuda", 0)) == known


@pytest.mark.parametrize(
    ("gpu", "dtype", "rows", "since", "taken"),
    [
        ("H200", torch.bfloat16, 1152, 1000, True),
        ("H200", torch.float16, 1152, 1000, True),
        ("H200", torch.bfloat16, 1152, None, False),
        ("H200", torch.bfloat16, 1152, 1153, False),
        ("H200", torch.float32, 1152, 1000, False),
        ("H200", torch.bfloat16, 100, 1, False),
        ("B200", torch.bfloat16, 1152, 1000, False),
        ("A100", torch.bfloat16, 1152, 1000, False),
    ],
)
def test_it_is_taken_only_where_the_table_and_the_gpu_allow_it(gpu, dtype, rows, since, taken, monkeypatch):
    monkeypatch.setattr(linear_table, "SPECIALISED_FROM", since)
    monkeypatch.setattr(linear_table, "SPECIALISED_LEAD", 0)  # as if it were the fastest at any size
    for op, shape in ((linear, (4096, 14336)), (gate_up_silu, (28672, 4096))):
        with AbsentGpu(GPUS[gpu]) as absent:
            op(*(torch.empty(size, shape[1], dtype=dtype, device="cuda") for size in (rows, shape[0])))
        assert ("linear_specialised._product" in {launch.name for launch in absent.launches}) == taken
        assert all(launch.constants.get("GATED", False) == (op == gate_up_silu) for launch in absent.launches if taken)


def of_ptxas(compiled):
    """What ptxas says of a compiled kernel: registers, spills, warnings."""
    return subprocess.run(
        [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "/dev/stdin", "-o", "/dev/null"],
        input=compiled.asm["ptx"], capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip


@pytest.mark.parametrize(
    ("launch", "splits", "dtype"),
    [(WIDE, 2, torch.bfloat16), (NARROW._replace(apart=True), 2, torch.float16), (GATED, 1, torch.bfloat16)],
    ids=["all ranges", "ranges apart", "gated"],
)
def test_it_compiles_without_spills_and_fits(launch, splits, dtype, monkeypatch, tmp_path):
    """With a bias, which takes most registers. A spill or a branch in the wrong place makes ptxas run one wgmma after the other."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with AbsentGpu(GPUS["H200"]) as gpu:
        x, w = (torch.empty(size, 4096, dtype=dtype, device="cuda") for size in (1000, 2048))
        b = torch.empty(2048, dtype=dtype, device="cuda")
        if launch == GATED:
            monkeypatch.setattr("headstart.kernels.linear.gated_mlp.num_splits", lambda *_: 1)
            gate_up_silu(x, w, b, launch)
        else:
            prefill_parts(x, w, b, splits, launch)
    (recorded,) = gpu.launches
    assert recorded.name == "linear_specialised._product"
    compiled = recorded.compile()
    assert compiled.metadata.shared <= GPUS["H200"].shared_memory
    said = of_ptxas(compiled)
    assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", said), said
    assert "Performance Loss" not in said, said


def replaced(x, w, b, splits, apart):
    """The same product by the kernel that is replaced."""
    if splits == 1 or apart:
        return prefill_linear(x, w, b, splits, PLAIN._replace(apart=apart))
    return prefill_linear(x, w, b, splits, SECOND_RANGE)


def assert_same_bits(x, w, b, splits):
    """Every tile, ranges of K whole and apart, with memory after x and without it."""
    for rows in ROWS:
        for apart in {False, splits > 1}:
            expected = replaced(x[:rows], w, b, splits, apart)
            for tile, given in ((WIDE, x[:rows]), (NARROW, x[:rows].clone()), (NARROW, x[:rows])):
                poison("cuda")
                found = prefill_parts(given, w, b, splits, tile._replace(apart=apart))
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected), (rows, apart, tile)


WIDTHS = [
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (4096, 11008),
    (3584, 18944),
    (18944, 3584),
    (1000, 2056),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [*((n, k, torch.bfloat16) for n, k in WIDTHS), *((n, k, torch.float16) for n, k in WIDTHS[::-4])],
)
def test_rows_have_the_bits_of_the_kernel_that_is_replaced(n, k, dtype):
    x, w, b = operands(max(ROWS), n, k, dtype, "cuda")
    splits = num_splits(n, k)
    assert torch.equal(add_parts(prefill_parts(x[:100], w, b, splits, WIDE), dtype), linear(x[:100], w, b))
    assert_same_bits(x, w, b, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_any_number_of_ranges_with_remainders_of_rows_features_and_depth(splits):
    for dtype in DTYPES:
        for n, k in ((1096, 3592), (104, 64)):
            x, w, _ = operands(max(ROWS), n, k, dtype, "cuda")
            assert_same_bits(x, w, None, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [WIDE, NARROW])
def test_more_row_tiles_than_one_group_and_more_waves_than_one(tile):
    x, w, _ = operands(5000, 6144, 1024, torch.bfloat16, "cuda")
    assert torch.equal(prefill_parts(x, w, None, 1, tile), prefill_linear(x, w, None, 1, PLAIN))


@pytest.mark.gpu
def test_it_writes_where_it_is_told():
    x, w, b = operands(1000, 4096, 4096, torch.bfloat16, "cuda")
    out = torch.full((1000, 4096), float("nan"), dtype=x.dtype, device="cuda")
    for tile in (WIDE, NARROW):
        found = prefill_parts(x, w, b, 2, tile, out=out.fill_(float("nan")))
        assert found.data_ptr() == out.data_ptr()
        assert torch.equal(out[None], replaced(x, w, b, 2, False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "k"), [(14336, 4096), (11008, 4096), (18944, 3584), (6000, 520)])
def test_the_gated_mlp_has_the_bits_of_its_parts(width, k, dtype):
    x, w, b = operands(max(ROWS), 2 * width, k, dtype, "cuda")
    for rows in ROWS:
        for bias in (b, None):
            poison("cuda")
            found = gate_up_silu(x[:rows], w, bias, GATED)
            assert torch.equal(found, silu_mul(linear(x[:rows], w, bias))), rows
            assert torch.equal(found, gate_up_silu(x[:rows], w, bias)), rows


def chain(x, weights, splits, launches):
    """x through one product after the other, each of them, by each launch in turn; every kernel reads what the last one wrote."""
    for w in weights:
        for launch in launches:
            y = empty_rows(*x.shape, x.dtype, x.device)
            x = add_parts(prefill_parts(x, w, None, splits, launch, out=y), x.dtype, y)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
def test_kernels_one_after_the_other_in_a_graph_and_outside(splits):
    """A kernel starts while the last one still runs (overlap.py): it waits for what it reads, its own kind before and after it."""
    x, w, _ = operands(1000, 2048, 2048, torch.bfloat16, "cuda")
    weights = [w, w.roll(1, 0), w.roll(2, 0)]
    apart = [tile._replace(apart=True) for tile in (WIDE, NARROW)]
    mixed = [WIDE, WIDE, NARROW, NARROW, *apart, PLAIN._replace(apart=True)]
    expected = chain(x, weights, splits, [PLAIN._replace(apart=True)] * len(mixed))
    assert expected.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(x, weights, splits, mixed), expected)
    assert_captured(lambda: chain(x, weights, splits, mixed))


@pytest.mark.gpu
def test_the_gated_mlp_in_a_graph():
    x, w, _ = operands(1152, 2 * 11008, 4096, torch.bfloat16, "cuda")
    assert_captured(lambda: gate_up_silu(gate_up_silu(x, w, None, GATED)[:, :4096].contiguous(), w, None, GATED))
