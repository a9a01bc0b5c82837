"""Which rows a rank is fed, in which order: train/data/rows.py."""

from types import SimpleNamespace

import numpy as np

from headstart.train.data.rows import deal_rows, rows_of_step


def test_ranks_and_micro_batches_share_out_the_rows_of_every_step():
    recipe = SimpleNamespace(batch_rows=3, accumulate=2, seed=5)
    ranks = [SimpleNamespace(num_processes=2, process_index=rank) for rank in range(2)]
    dealt = [list(deal_rows(range(4, 7), 31, recipe, rank)) for rank in ranks]
    assert [len(one) for one in dealt] == [6, 6]
    for i, step in enumerate(range(4, 7)):
        parts = [dealt[rank][2 * i + micro] for micro in range(2) for rank in range(2)]
        assert np.concatenate(parts).tolist() == rows_of_step(step, 12, 31, seed=5).tolist()
