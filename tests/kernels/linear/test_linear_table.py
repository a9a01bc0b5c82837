"""The launch tables of the products: what they name fits the hardware, and every row finds a tile."""

import pytest

from headstart.kernels.linear.linear_table import (
    DECODE,
    GATED_DECODE,
    PREFILL_TILES,
    ROW_TILES,
    SECOND_RANGE,
    SPLIT_ALIGNMENT,
    SPLITS,
    decode_launch,
    fit_decode,
    gated_launch,
    gated_prefill_launch,
    num_splits,
    prefill_launch,
    split_depth,
    tile_rows,
)
from headstart.kernels.shared_memory import H200, SharedMemory


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


def test_tiles_of_many_rows_fit_and_fill_the_card():
    """At 320 rows two ranges of K apart make 128 tiles of 160 x 128 for 132 multiprocessors; at 8192 one program sums both."""
    for rows in (129, 160, 256, 320, 384, 1000, 8192):
        for splits in (1, 2, 4):
            launch = prefill_launch(4096, 14336, splits, rows, 132)
            width = 128 if splits == 1 else 64
            stored = 0 if launch.in_halves else launch.rows * width * (4 if splits > 1 else 2)
            assert (launch.features + launch.rows) * launch.depth * 2 * launch.stages + stored < 227 << 10
        assert gated_prefill_launch(14336, 4096, rows, 132).features <= 128
    assert prefill_launch(4096, 14336, 2, 320, 132)[:2] == (160, 128)
    assert prefill_launch(4096, 14336, 2, 384, 132)[:2] == (192, 128)
    assert prefill_launch(4096, 14336, 2, 256, 132)[:2] == (128, 128)
    assert prefill_launch(4096, 14336, 2, 320, 132).apart
    assert not prefill_launch(4096, 14336, 2, 8192, 132).apart
    assert prefill_launch(6144, 4096, 1, 320, 132)[:2] == (64, 256)


@pytest.mark.parametrize(("count", "rows"), [(1, 16), (16, 16), (17, 32), (65, 80), (81, 96), (97, 128), (5000, 128)])
def test_a_row_tile_is_the_narrowest_that_holds_the_rows(count, rows):
    assert tile_rows(count) == rows


SMALL, MEDIUM = SharedMemory(99 << 10, 1), SharedMemory(163 << 10, 1)  # compute capability 8.6, 8.9 and 12.0; 8.0


@pytest.mark.parametrize("memory", [SMALL, MEDIUM, H200])
def test_every_decode_launch_fits_the_gpu_and_an_h200_keeps_all(memory):
    for n, k in (*SPLITS, (1, 1), (300, 20000), (14336, 4096), (1 << 20, 8192)):
        for rows in ROW_TILES:
            for table, operands in ((decode_launch, 1), (gated_launch, 2)):
                for itemsize in (2, 4) if rows <= 64 else (2,):
                    launch = table(n, k, rows, itemsize)
                    fitted = fit_decode(launch, rows, memory, operands, itemsize)
                    tile = (fitted.features * operands + rows) * fitted.depth * itemsize
                    assert tile * (fitted.stages - memory.held) < memory.size
                    assert fitted.stages >= min(launch.stages, 2 + memory.held)
                    assert fitted.depth == launch.depth
                    assert fitted == launch or memory != H200


@pytest.mark.parametrize("memory", [SMALL, H200])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_every_tile_of_many_rows_fits_the_gpu(memory, splits):
    found = set()
    for n, k in ((4096, 14336), (6144, 4096), (128256, 4096), (1152, 896)):
        for rows in (129, 160, 192, 256, 320, 384, 500, 1000, 8192):
            found.add(prefill_launch(n, k, splits, rows, 132, memory))
    for launch in found:
        tile = (launch.rows + launch.features) * launch.depth * 2
        stored = 0 if launch.in_halves else launch.rows * (128 * 2 if splits == 1 else 64 * 4)
        assert tile * (launch.stages - memory.held) + stored < memory.size
        assert launch.stages >= 2 + memory.held  # loads overlap products
        assert launch.depth == 64
    if memory == H200:
        whole = {launch._replace(apart=False) for launch in found if not launch.handover}
        assert whole <= {*PREFILL_TILES, SECOND_RANGE}
    else:
        assert all(launch.apart == (splits > 1) for launch in found)  # no room for a program that sums all ranges
