"""Which tokens an EAGLE-3 head or a block drafter drafts: train/data/packed/draft_vocabulary.py."""

import importlib

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from headstart.heads.checkpoint import load_head
from headstart.tests.train.tiny_runs import all_lines
from headstart.train.data.packed.blend import BlendedRows
from headstart.train.data.packed.draft_vocabulary import choose_draft_vocabulary
from headstart.train.data.packed.packing import lay_out, pack


def choose(documents, size, stop_ids, word_target):
    return choose_of_rows(pack(documents, 12), size, stop_ids, word_target)


def choose_of_rows(packed, size, stop_ids, word_target):
    said = []
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    _, t2d = choose_draft_vocabulary(packed, size, stop_ids, vocab_size=48, tokenizer=tokenizer, note=said.append)
    return t2d.nonzero().flatten().tolist(), said


def test_draft_vocabulary_is_what_is_supervised_most_and_the_stop_tokens(word_target):
    asked = [False] * 4
    documents = [([30, 30, 30, 30, 7, 7, 8, 2], [*asked, True, True, True, True])] * 3
    documents += [([31, 31, 31, 31, 9, 9, 9, 8], [*asked, True, True, True, True])]
    assert choose(documents, 3, [2], word_target) == (
        [2, 7, 8],
        ["draft vocabulary: 3 of 48 tokens, 81.25% of the supervised ones"],
    )
    # Two answers in one document end twice; the last is without the stop token, and nothing names one.
    ids, said = choose([([5, 6, 6, 2, 5, 6, 6, 3], [False, True, True, True] * 2)], 2, [], word_target)
    assert ids == [2, 6]
    assert (
        "warning: 50% of the answers end with a token that is not in the draft vocabulary, mostly '<unk>' (3)"
        in said[1]
    )
    assert "each of them takes one pass of the target more, in 3 tokens" in said[1]
    # A document that was cut ends with some token, and no answer with it.
    _, said = choose([([30, 31, *range(4, 20)], [False] * 2 + [True] * 16)], 2, [2], word_target)
    assert len(said) == 1


def test_a_token_counts_as_often_as_its_set_is_passed(word_target):
    """One row of two fives and a six, and three rows of two sevens and an eight."""
    few = lay_out([([4, 4, 5, 5, 6], [False] * 2 + [True] * 3)], 12)
    many = lay_out([([4, 4, 7, 7, 8, *[4] * 6], [False] * 2 + [True] * 3 + [False] * 6)] * 3, 12)
    for rows, ids, share in (((1, 3), [7, 8], 9), ((2, 2), [5, 7], 8), ((3, 1), [5, 6], 9)):
        found, said = choose_of_rows(BlendedRows([few, many], np.array(rows)), 2, [], word_target)
        assert found == ids
        assert said[0] == f"draft vocabulary: 2 of 48 tokens, {share / 12:.2%} of the supervised ones"


@pytest.mark.parametrize("family", ["eagle3", "block"])
def test_resumed_run_keeps_its_draft_vocabulary(trainers, monkeypatch, family):
    """Whatever would be chosen from the data now; the engine that measures drafts from it, too."""
    trainer, keys = trainers[family], {"eval_prompts": 4, "eval_tokens": 8, "draft_vocab_size": 24, "lr": 0}
    with monkeypatch.context() as patch:
        tokens = torch.arange(20, 44)
        chosen = tokens - torch.arange(24), torch.isin(torch.arange(48), tokens)
        patch.setattr(
            importlib.import_module(f"headstart.train.{family}"), "choose_draft_vocabulary", lambda *_, **__: chosen
        )
        run = trainer.run(**keys, max_steps=1)
    trainer.run(**keys, max_steps=2, resume=True)
    assert torch.equal(load_head(run / "head").draft_token_ids, tokens)
    one, two = all_lines(run, "acceptance")
    assert one == two | {"step": 1}
    with pytest.raises(ValueError, match="was started with draft_vocab_size 24, not 30"):
        trainer.main(**keys | {"draft_vocab_size": 30}, max_steps=3, resume=True)
