"""Which rows a rank is fed, in which order: train/data/rows.py."""

from types import SimpleNamespace

import numpy as np

from headstart.train.data import rows
from headstart.train.data.rows import build_rows, choose_documents, deal_rows, rows_of_step


def test_ranks_and_micro_batches_share_out_the_rows_of_every_step():
    recipe = SimpleNamespace(batch_rows=3, accumulate=2, seed=5)
    ranks = [SimpleNamespace(num_processes=2, process_index=rank) for rank in range(2)]
    for step in range(4, 7):
        fed = rows_of_step(step, 12, 31, seed=5)
        dealt = [list(deal_rows(fed, recipe, rank)) for rank in ranks]
        assert [len(one) for one in dealt] == [2, 2]
        parts = [dealt[rank][micro] for micro in range(2) for rank in range(2)]
        assert [first for first, _ in parts] == [0, 3, 6, 9]
        assert np.concatenate([rows for _, rows in parts]).tolist() == fed.tolist()


def test_what_the_cap_drops_is_not_encoded_first(monkeypatch):
    """Sixteen characters a token are taken for more than enough: what lies after them is not even encoded."""
    asked = []

    def encode(tokenizer, conversations, progress):
        asked.append(len(conversations))
        return [([1] * (len(messages[0]["content"]) // 4), []) for messages in conversations]

    monkeypatch.setattr(rows, "encode_conversations", encode)
    many = [[{"role": "user", "content": "x" * 40}] for _ in range(300)]
    assert len(choose_documents(None, many, 64, 100, seed=0)) == 10
    assert len(choose_documents(None, many, 64, 0, seed=0)) == 300
    assert asked == [41, 300]


def test_padding_of_a_tokenizer_without_a_token_for_it_is_zero():
    for pad, found in ((None, 0), (7, 7)):
        packed, _ = build_rows([([3, 4, 5], [True] * 3)], 5, pad, note=lambda text: None)
        assert packed.input_ids.tolist() == [[3, 4, 5, found, found]]
