"""Encoded documents in five bytes a token, and rows that are made when they are asked for."""

import numpy as np
import pytest
import torch

from headstart.train.data.packed import packing
from headstart.train.data.packed.documents import Documents
from headstart.train.data.packed.packing import lay_out, pack

PARTS = ("input_ids", "position_ids", "document_ids", "supervised")


def random_pairs(count, longest, seed=0):
    dice = np.random.default_rng(seed)
    lengths = dice.integers(0, longest + 1, count)
    return [(dice.integers(0, 2**31, n).tolist(), (dice.random(n) < 0.5).tolist()) for n in lengths]


def test_documents_are_what_was_given():
    pairs = random_pairs(50, 30)
    documents = Documents.of(pairs)
    assert documents == pairs
    assert list(documents[3:11]) == pairs[3:11]
    assert list(documents[3:11][2:4]) == pairs[5:7]
    assert documents[-1] == pairs[-1]
    assert list(documents[5:2]) == []
    assert documents.lengths.tolist() == [len(ids) for ids, _ in pairs]
    assert documents.tokens.nbytes + documents.supervised.nbytes == 5 * documents.lengths.sum()
    assert list(documents.all_supervised()) == [(ids, [True] * len(ids)) for ids, _ in pairs]
    assert list(Documents.of([])) == []
    assert list(documents.take([7, 2])) == [pairs[7], pairs[2]]
    with pytest.raises(IndexError):
        documents[50]


@pytest.mark.parametrize("at_once", [1, 7, 64, 2**20])
def test_supervised_tokens_are_counted_between_two_places(at_once):
    pairs = random_pairs(80, 20)
    for chosen in (range(80), range(9, 60), [70, 3, 41, 4, 5]):
        documents = Documents.of(pairs).take(list(chosen))
        expected = [sum(pairs[i][1][2:12]) for i in chosen]
        assert documents.count_supervised(2, 12, at_once).tolist() == expected


def test_rows_made_on_demand_are_those_of_the_whole(monkeypatch):
    pairs = random_pairs(300, 50)
    rows, whole = lay_out(pairs, 37, 5), pack(pairs, 37, 5)
    assert len(rows) == len(whole)
    chosen = [7, 0, 7, len(rows) - 1]
    for part in PARTS:
        expected = getattr(whole, part)
        assert torch.equal(getattr(rows.select(chosen), part), expected[chosen])
        assert torch.equal(getattr(rows.select(slice(3, 9)), part), expected[3:9])
        assert torch.equal(getattr(whole.select(chosen), part), expected[chosen])
        for size in (1, 37 * 4, 10**9):
            monkeypatch.setattr(packing, "BLOCK_TOKENS", size)
            assert torch.equal(torch.cat([getattr(some, part) for some in rows.blocks()]), expected)
    assert rows.count_tokens(chosen) == whole.count_tokens(chosen) == int((whole.document_ids[chosen] >= 0).sum())
    kept = np.arange(len(rows)) % 3 == 1
    assert torch.equal(rows.keep(kept).select(slice(None)).input_ids, whole.input_ids[1::3])
    begins = (whole.position_ids == 0) & (whole.document_ids >= 0)
    assert rows.busiest() == (int(begins.sum(1).argmax()), int(whole.position_ids.amax(1).argmax()))
