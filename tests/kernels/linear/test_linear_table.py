"""The launch tables of the products: what they name fits the hardware, and every row finds a tile."""

import pytest

from headstart.kernels.linear.linear_table import (
    DECODE,
    GATED_DECODE,
    ROW_TILES,
    SPLIT_ALIGNMENT,
    SPLITS,
    decode_launch,
    gated_launch,
    num_splits,
    split_depth,
    tile_rows,
)


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
