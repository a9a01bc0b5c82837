"""Which tokens an EAGLE-3 head or a block drafter drafts: train/data/packed/draft_vocabulary.py."""

from transformers import AutoTokenizer

from headstart.train.data.packed.draft_vocabulary import choose_draft_vocabulary
from headstart.train.data.packed.packing import pack


def choose(documents, size, stop_ids, word_target):
    said, packed = [], pack(documents, 12)
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
