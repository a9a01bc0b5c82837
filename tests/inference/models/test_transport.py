"""What ranks gather: parts in the order of the ranks, bit by bit, and an error where a rank is gone."""

import os
import time
from datetime import timedelta

import pytest
import torch

from headstart.inference.models import transport
from headstart.inference.models.transport import ALONE, RankLost
from headstart.tests.inference.forked_ranks import on_ranks


def gathered(ranks):
    part = torch.arange(6.0).view(2, 3) - 1000 * ranks.rank
    strange = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40]).to(torch.bfloat16)
    empty = ranks.gather(torch.empty(0, 3))
    return [
        ranks.gather(part.T).tolist(),
        ranks.gather(strange).view(torch.int16).tolist(),
        list(empty.shape),
        ranks.least(7 - ranks.rank),
    ]


def test_parts_come_in_the_order_of_the_ranks():
    part = torch.arange(6.0).view(2, 3)
    bits = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40]).to(torch.bfloat16).view(torch.int16).tolist()
    expected = [[(part - 1000 * rank).T.tolist() for rank in range(3)], [bits] * 3, [3, 0, 3], 5]
    assert on_ranks(3, gathered) == [expected] * 3
    assert ALONE.gather(part).tolist() == [part.tolist()]
    assert ALONE.least(3) == 3


def late(ranks):
    if ranks.rank:
        time.sleep(1.5)
    return ranks.least(ranks.rank)


def test_a_rank_may_be_late_once_all_have_met(monkeypatch):
    monkeypatch.setattr(transport, "MEET", timedelta(seconds=0.5))
    assert on_ranks(2, late) == [0, 0]


def left(ranks):
    if ranks.rank == 1:
        return None
    time.sleep(0.2)
    with pytest.raises(RankLost, match="rank 0 of 2 cannot reach the others"):
        ranks.least(1)
    return b"noticed"


def test_a_rank_that_leaves_is_noticed():
    assert on_ranks(2, left) == [b"noticed", None]


def test_a_rank_that_does_not_come_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "MEET", timedelta(seconds=0.5))
    with pytest.raises(RankLost, match="rank 0 of 2 cannot reach the others"):
        transport.GlooRanks(os.fspath(tmp_path), 0, 2)
