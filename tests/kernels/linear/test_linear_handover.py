"""Tiles that one program begins and another ends: the bits of tiles that nobody shares, and flags that are down again."""

import pytest
import torch

from headstart.kernels.linear import linear_handover
from headstart.kernels.linear.gated_mlp import gate_up_silu, gate_up_silu_reference
from headstart.kernels.linear.linear import empty_rows, linear, linear_reference
from headstart.kernels.linear.linear_handover import handover_flags, handover_product
from headstart.kernels.linear.linear_table import (
    HANDOVER,
    PrefillLaunch,
    gated_prefill_launch,
    num_shares,
    num_splits,
    prefill_launch,
)
from headstart.kernels.shared_memory import SharedMemory
from headstart.kernels.silu_mul import silu_mul
from headstart.tests.kernels.linear.products import error, operands, poison


def product(x, w, b, splits, launch, gated=False):
    """The product in parts [S, M, N], or the gated one [M, I], in memory where an unwritten number shows."""
    width = w.shape[0] // 2 if gated else w.shape[0]
    dtype = x.dtype if splits == 1 else torch.float32
    shape = (len(x), width) if splits == 1 else (splits, len(x), width)
    out = torch.full(shape, float("nan"), dtype=dtype, device=x.device)
    return handover_product(x, w, b, splits, launch, out, gated)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("rows", "splits", "gated", "bias"),
    [(48, 1, False, False), (24, 1, True, True), (24, 1, True, False), (32, 2, False, True)],
)
def test_shared_tiles_have_the_bits_of_whole_ones_in_the_interpreter(monkeypatch, rows, splits, gated, bias):
    """Tiles of one and of two halves, remainders of rows, features and depth; ends, whole tiles and beginnings of all lengths."""
    x, w, b = operands(37, 2 * 72 if gated else 72, 136 if splits == 1 else 128 * splits - 40, torch.float16)
    b = b if bias else None
    launch = PrefillLaunch(rows, 16, 32, 1, 4, 1, True, True)
    row_tiles = -(-37 // rows)

    def on(multiprocessors):
        monkeypatch.setattr(linear_handover, "num_multiprocessors", lambda device: multiprocessors)
        linear_handover._flags.clear()
        return product(x, w, b, splits, launch, gated)

    expected = on(row_tiles)  # one program walks all tiles of a row tile
    found = expected.float() if gated else expected.float().sum(0)
    reference = gate_up_silu_reference if gated else linear_reference
    exact = reference(x.double(), w.double(), None if b is None else b.double())
    assert error(found.half(), exact) <= 2 * error(reference(x, w, b), exact)
    for shares in (2, 3, 4, 100):
        assert torch.equal(on(shares * row_tiles), expected), shares
        assert not handover_flags(x.device).any()
    linear_handover._flags.clear()  # of more programs than any device has


def test_a_share_is_a_tile_at_least_and_all_programs_have_one():
    launch = PrefillLaunch(320, 128, 64, 3, 8, 1, True, True)
    assert num_shares(launch, 28672, 1, 320, 132) == 132
    assert num_shares(launch, 12800, 1, 320, 132) == 100  # as many as tiles
    assert num_shares(launch, 6400, 2, 320, 132) == 100
    assert num_shares(launch, 28672, 1, 1000, 132) == 33  # of 4 row tiles each
    assert num_shares(launch, 28672, 1, 132 * 320 + 1, 132) == 0


def test_only_products_that_run_alone_on_a_gpu_like_the_measured_hand_over():
    assert prefill_launch(28672, 4096, 1, 320, 132).handover
    assert gated_prefill_launch(14336, 4096, 320, 132)[:2] == (64, 128)
    assert not prefill_launch(28672, 4096, 1, 320, 132, late=True).handover
    assert not prefill_launch(28672, 4096, 1, 320, 148).handover
    assert not prefill_launch(28672, 4096, 1, 320, 132, SharedMemory(99 << 10, 1)).handover
    assert not prefill_launch(28672, 4096, 2, 320, 132).handover
    assert prefill_launch(4096, 14336, 2, 1280, 132).handover
    assert not prefill_launch(4096, 14336, 1, 1280, 132).handover


TILES = sorted({tile for by_rows in HANDOVER.values() for tile in by_rows.values()})
PRODUCTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]  # of an 8B


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [*PRODUCTS, (1000, 2056), (104, 64)])
def test_shared_tiles_have_the_bits_of_the_decode_kernel(n, k):
    """Every number of rows with two of the tiles."""
    x, w, b = operands(1000, n, k, torch.bfloat16, "cuda")
    expected = torch.cat([linear(part, w, b) for part in x.split(100)])
    for place, rows in enumerate((320, 384, 512, 1000)):
        given = empty_rows(rows, k, torch.bfloat16, "cuda").copy_(x[:rows])
        for tile in (TILES[place % len(TILES)], TILES[(place + 1) % len(TILES)]):
            poison("cuda")
            total, *parts = product(given, w, b, num_splits(n, k), tile)
            for part in parts:
                total = total + part
            assert torch.equal(total.bfloat16(), expected[:rows]), (rows, tile)
    assert not handover_flags(x.device).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "k", "dtype"), [(14336, 4096, torch.bfloat16), (6000, 520, torch.float16)])
def test_shared_tiles_of_the_gated_product_have_the_bits_of_linear_and_silu_mul(width, k, dtype):
    x, w, b = operands(1000, 2 * width, k, dtype, "cuda")
    expected = torch.cat([silu_mul(linear(part, w, b, splits=1)) for part in x.split(100)])
    for tile in TILES:
        tile = tile._replace(features=tile.features // 2)
        for rows in (130, 192, 320, 384, 512, 1000):
            assert torch.equal(product(x[:rows], w, b, 1, tile, True), expected[:rows]), (rows, tile)


@pytest.mark.gpu
def test_a_thousand_replays_under_load_have_the_same_bits():
    """All that the table hands over, in one graph, so that flags and memory of one product are those of the next."""
    x, w, _ = operands(768, 28672, 4096, torch.bfloat16, "cuda")
    short = w[:6144]
    wide, down, _ = operands(1280, 4096, 14336, torch.bfloat16, "cuda")

    def work():
        gated = [gate_up_silu(x[:rows], w) for rows in (192, 320, 384, 640, 768)]
        return torch.cat([y.flatten() for y in (*gated, linear(x[:512], short), linear(x, short), linear(wide, down))])

    expected, wrong = work(), torch.zeros((), dtype=torch.int64, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
    with torch.cuda.graph(graph, stream=stream):
        found = work()
    for _ in range(1000):
        found.fill_(float("nan"))
        graph.replay()
        wrong += (found != expected).sum()
    assert wrong.item() == 0
    assert torch.equal(found[: 192 * 14336].view(192, -1)[:100], gate_up_silu(x[:100], w))
    assert torch.equal(found[-1280 * 4096 :].view(1280, -1)[:100], linear(wide[:100], down))
    assert not handover_flags(x.device).any()


@pytest.mark.gpu
def test_two_streams_do_not_take_each_others_sums():
    """As two engines' graphs, which may run side by side."""
    x, w, _ = operands(320, 28672, 4096, torch.bfloat16, "cuda")
    inputs, found, graphs = [x, x.flip(0).contiguous()], [], []
    expected, streams = [gate_up_silu(one, w) for one in inputs], [torch.cuda.Stream() for _ in inputs]
    for stream, one in zip(streams, inputs):
        with torch.cuda.stream(stream):
            gate_up_silu(one, w)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            found.append([gate_up_silu(one, w) for _ in range(20)])
    for _ in range(50):
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for outputs, whole in zip(found, expected):
        assert all(torch.equal(one, whole) for one in outputs)
