"""Which rows a rank is fed, in which order: train/data/rows.py."""

from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoTokenizer

from headstart.train.data import rows
from headstart.train.data.conversations import load_conversations
from headstart.train.data.packed.documents import Documents
from headstart.train.data.packed.packing import lay_out
from headstart.train.data.rows import build_rows, choose_documents, deal_rows, rows_of_step
from headstart.train.loss.distillation import find_labels

ROWS = {count: lay_out([([1, 2, 3], [True] * 3)] * count, 3) for count in (20, 31)}  # so many rows


def test_ranks_and_micro_batches_share_out_the_rows_of_every_step():
    recipe = SimpleNamespace(batch_rows=3, accumulate=2, seed=5)
    ranks = [SimpleNamespace(num_processes=2, process_index=rank) for rank in range(2)]
    for step in range(4, 7):
        fed = rows_of_step(step, 12, ROWS[31], seed=5)
        dealt = [list(deal_rows(fed, recipe, rank)) for rank in ranks]
        assert [len(one) for one in dealt] == [2, 2]
        parts = [dealt[rank][micro] for micro in range(2) for rank in range(2)]
        assert [first for first, _ in parts] == [0, 3, 6, 9]
        assert np.concatenate([rows for _, rows in parts]).tolist() == fed.tolist()


def test_what_the_cap_drops_is_not_encoded_first(monkeypatch):
    """Sixteen characters a token are taken for more than enough: what lies after them is not even encoded."""
    asked = []

    def encode(tokenizer, conversations, progress, **_):
        lengths = [len(messages[0]["content"]) // 4 for messages in conversations]
        asked.append(len(lengths))
        return Documents.of(([1] * length, [True] * length) for length in lengths), np.arange(len(lengths))

    monkeypatch.setattr(rows, "encode_places", encode)
    many = [[{"role": "user", "content": "x" * 40}] for _ in range(300)]
    assert len(choose_documents(None, many, 64, 100, seed=0)) == 10
    assert len(choose_documents(None, many, 64, 0, seed=0)) == 300
    assert asked == [41, 300]


def test_padding_of_a_tokenizer_without_a_token_for_it_is_zero():
    for pad, found in ((None, 0), (7, 7)):
        packed, _ = build_rows([([3, 4, 5], [True] * 3)], 5, pad, note=lambda text: None)
        assert packed.select([0]).input_ids.tolist() == [[3, 4, 5, found, found]]


def test_max_tokens_picks_whole_conversations_at_random(word_target, conversations):
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    loaded = load_conversations(conversations)

    def choose(max_tokens, seed):
        documents = choose_documents(tokenizer, loaded, 64, max_tokens, seed)
        return build_rows(documents, 64, tokenizer.pad_token_id, note=lambda text: None)

    everything, _ = choose(0, 0)
    some, counts = choose(400, 0)
    others, _ = choose(400, 1)
    everyone = slice(None)
    assert 370 < some.count_tokens(everyone) <= 400 < everything.count_tokens(everyone)
    assert some.select(everyone).input_ids.tolist() != others.select(everyone).input_ids.tolist()
    assert counts.tolist() == some.count_labels().tolist()


def test_max_examples_picks_conversations_at_random_and_more_of_them_are_the_same_and_more(word_target, conversations):
    tokenizer, loaded = AutoTokenizer.from_pretrained(word_target), load_conversations(conversations)

    def choose(max_examples, max_tokens=0, seed=0):
        return list(choose_documents(tokenizer, loaded, 64, max_tokens, seed, max_examples=max_examples))

    everything = choose(0)
    assert len(everything) == 60
    for count in (1, 7, 59, 60, 99):
        assert choose(count) == everything[:count]
    assert choose(7, seed=1) != everything[:7]
    assert choose(30, 100) == choose(0, 100)
    assert choose(3, 100) == everything[:3]


def test_labels_per_row_count_what_the_first_head_predicts():
    marks = [False, False, True, True]
    rows = lay_out([([1, 2, 3, 4], marks), ([5, 6], [True, True]), ([7, 8, 9], [True] * 3)], 6)
    assert sorted(rows.count_labels().tolist()) == [1, 2]
    dice = np.random.default_rng(0)
    lengths = dice.integers(0, 40, 200)
    rows = lay_out([(dice.integers(0, 9, n).tolist(), (dice.random(n) < 0.5).tolist()) for n in lengths], 32)
    packed = rows.select(slice(None))
    labels = find_labels(packed.input_ids, packed.document_ids, packed.supervised, num_depths=1)
    found = torch.bincount(labels.positions // rows.row_length, minlength=len(rows))
    assert rows.count_labels().tolist() == found.tolist()


def test_every_epoch_feeds_every_row_once_in_an_order_of_its_own():
    fed = [row for step in range(15) for row in rows_of_step(step, 4, ROWS[20], seed=3)]
    epochs = [fed[:20], fed[20:40], fed[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[1] == np.random.default_rng((3, 1)).permutation(20).tolist()  # as runs under way know it
    assert fed[:4] != rows_of_step(0, 4, ROWS[20], seed=4).tolist()
