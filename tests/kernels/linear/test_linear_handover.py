"""Tiles that one program begins and another ends: the bits of tiles that nobody shares, and flags that are down again."""

import pytest
import torch

from headstart.kernels.linear import linear_handover
from headstart.kernels.linear.gated_mlp import gate_up_silu_reference
from headstart.kernels.linear.linear import empty_rows, linear, linear_reference
from headstart.kernels.linear.linear_handover import handover_flags, handover_product
from headstart.kernels.linear.linear_table import HANDOVER_TILES, PrefillLaunch, num_shares, num_splits
from headstart.kernels.silu_mul import silu_mul
from headstart.tests.kernels.linear.products import assert_captured, error, operands, poison


def product(x, w, b, splits, launch, gated=False):
    """The product in parts [S, M, N], or the gated one [M, I], in memory where an unwritten number shows."""
    width = w.shape[0] // 2 if gated else w.shape[0]
    dtype = x.dtype if splits == 1 else torch.float32
    out = torch.full((len(x), width) if gated else (splits, len(x), width), float("nan"), dtype=dtype, device=x.device)
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
        handover_flags.cache_clear()
        return product(x, w, b, splits, launch, gated)

    expected = on(row_tiles)  # one program walks all tiles of a row tile
    found = expected.float() if gated else expected.float().sum(0)
    reference = gate_up_silu_reference if gated else linear_reference
    exact = reference(x.double(), w.double(), None if b is None else b.double())
    assert error(found.half(), exact) <= 2 * error(reference(x, w, b), exact)
    for shares in (2, 3, 4, 100):
        assert torch.equal(on(shares * row_tiles), expected), shares
        assert not handover_flags(x.device).any()
    handover_flags.cache_clear()  # of more programs than any device has


def test_a_share_is_a_tile_at_least_and_all_programs_have_one():
    launch = PrefillLaunch(320, 128, 64, 3, 8, 1, True, True)
    assert num_shares(launch, 28672, 1, 320, 132) == 132
    assert num_shares(launch, 12800, 1, 320, 132) == 100  # as many as tiles
    assert num_shares(launch, 6400, 2, 320, 132) == 100
    assert num_shares(launch, 28672, 1, 1000, 132) == 33  # of 4 row tiles each
    assert num_shares(launch, 28672, 1, 132 * 320 + 1, 132) == 0


PRODUCTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]  # of an 8B
CASES = [(n, k, torch.bfloat16) for n, k in [*PRODUCTS, (104, 64)]] + [(1000, 2056, torch.float16)]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "dtype"), CASES)
def test_every_tile_has_the_bits_of_the_decode_kernel(n, k, dtype):
    x, w, b = operands(1000, n, k, dtype, "cuda")
    expected = torch.cat([linear(part, w, b) for part in x.split(100)])
    for rows in (130, 192, 320, 384, 512, 1000):
        given = empty_rows(rows, k, dtype, "cuda").copy_(x[:rows])
        for tile in HANDOVER_TILES:
            poison("cuda")
            total, *parts = product(given, w, b, num_splits(n, k), tile)
            for part in parts:
                total = total + part
            assert torch.equal(total.to(dtype), expected[:rows]), (rows, tile)
    assert not handover_flags(x.device).any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "k", "dtype"),
    [(14336, 4096, torch.bfloat16), (6000, 520, torch.float16), (104, 64, torch.bfloat16)],
)
def test_every_tile_of_the_gated_product_has_the_bits_of_linear_and_silu_mul(width, k, dtype):
    x, w, b = operands(1000, 2 * width, k, dtype, "cuda")
    for bias in (b, None):
        expected = torch.cat([silu_mul(linear(part, w, bias, splits=1)) for part in x.split(100)])
        for rows in (130, 192, 320, 384, 512, 1000):
            for tile in HANDOVER_TILES:
                found = product(x[:rows], w, bias, 1, tile._replace(features=tile.features // 2), True)
                assert torch.equal(found, expected[:rows]), (rows, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", HANDOVER_TILES, ids=lambda tile: f"{tile.rows}x{tile.features}")
def test_a_thousand_replays_under_load_have_the_same_bits(tile):
    """Three products in turn in one graph, so that flags and sums of one are those of the next."""
    x, w, _ = operands(384, 28672, 4096, torch.bfloat16, "cuda")
    short = w[:6144]
    gated = tile._replace(features=tile.features // 2)

    def work():
        first = product(x, w, None, 1, gated, True)
        second = product(x, short, None, 1, tile)
        return torch.cat((first, second[0], product(x[:320], w, None, 1, gated, True).view(384, -1)), 1)

    assert_captured(work)
    expected, wrong = work(), torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    for _ in range(1000):
        found.fill_(float("nan"))
        graph.replay()
        wrong += (found != expected).sum()
    assert wrong.item() == 0
    assert not handover_flags(x.device).any()
