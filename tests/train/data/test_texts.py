"""Plain texts: every token is supervised, a long text goes on in the next document, and only a recipe that asks reads them."""

import json
import re

import pytest
from transformers import AutoTokenizer

from headstart.cli import main
from headstart.tests.train.conftest import WORDS
from headstart.tests.train.tiny_runs import all_lines
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_places
from headstart.train.data.packed.packing import lay_out
from headstart.train.data.rows import build_rows


def write_texts(path, lengths):
    texts = [" ".join(WORDS[(place + i) % len(WORDS)] for i in range(n)) for place, n in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": text, "meta": place}) + "\n" for place, text in enumerate(texts)))
    return texts


def test_texts_are_packed_one_after_the_other_and_all_of_them_is_supervised(word_target):
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    texts = [" ".join(WORDS[:length]) for length in (3, 25, 9, 10, 1)]
    given = [[{"role": "text", "content": text}] for text in texts]
    documents, places = encode_places(tokenizer, given, document="text", row_length=10)
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert places.tolist() == [0, 1, 1, 1, 2, 3, 3, 4]
    assert [one for one, _ in documents] == [one[i : i + 10] for one in ids for i in range(0, len(one), 10)]
    assert all(all(marks) for _, marks in documents)
    rows, counts = build_rows(documents, 10, 0, print)
    assert rows.num_cut == 0
    assert lay_out(documents, 10).count_tokens(slice(None)) == sum(map(len, ids))
    assert counts.sum() == sum(max(len(one) - 2, 0) for one, _ in documents)


def test_an_end_that_the_tokenizer_writes_is_not_written_twice(word_target, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    given = [[{"role": "text", "content": f"{WORDS[0]} {tokenizer.eos_token}"}]]
    ((ids, _),), _ = encode_places(tokenizer, given, document="text", row_length=10)
    assert ids.count(tokenizer.eos_token_id) == 1


def test_a_recipe_of_conversations_says_how_to_ask_for_texts(tmp_path, trainer, conversations):
    write_texts(tmp_path / "texts.jsonl", [5] * 20)
    with pytest.raises(
        ValueError, match=r"line 1: expected .* plain text trains an MLP speculator, with --document text"
    ):
        load_conversations(str(tmp_path / "texts.jsonl"))
    with pytest.raises(ValueError, match="document must be one of conversation, answer, got 'text'"):
        trainer.main(document="text")


@pytest.fixture
def speculator(trainers):
    return trainers["mlp_speculator"]


def test_an_mlp_speculator_trains_on_texts(speculator, tmp_path, conversations, capsys):
    write_texts(tmp_path / "texts.jsonl", [*range(3, 40), 200])
    keys = dict(data=tmp_path / "texts.jsonl", document="text", max_steps=2)
    plain = speculator.run(**keys, output=tmp_path / "plain")
    told = capsys.readouterr().err
    lengths = [*range(4, 41), 64, 64, 64, 9]  # of the documents, ends included
    labels = sum(length - 2 for length in lengths)
    assert re.search(rf"41 documents in \d+ rows of 64 tokens, {labels} labels; 0 longer than a row were cut", told)
    packed = speculator.run(**keys, packed_data=tmp_path / "packed", output=tmp_path / "packed-run")
    assert all_lines(packed) == all_lines(plain)
    measured = dict(eval_data=conversations, eval_prompts=2, eval_tokens=5)
    speculator.run(**keys, **measured, output=tmp_path / "measured")
    assert (tmp_path / "measured" / "acceptance.json").is_file()


def test_the_survey_counts_texts(tmp_path, word_target, capsys):
    write_texts(tmp_path / "texts.jsonl", [5, 25, 9])
    words = [
        "data",
        str(tmp_path / "texts.jsonl"),
        "--document",
        "text",
        "--tokenizer",
        word_target,
        "--row-length",
        "10",
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'texts.jsonl'}: 3 texts\n")
    assert "100.0% of the tokens are supervised" in said
    assert "5 documents; 0 are longer than a row and lose 0 tokens" in said


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"eval_prompts": 3},
            "plain texts hold no requests to measure .* name conversations as eval_data, or set eval_prompts",
        ),
        ({"data": "stdlib"}, "stdlib holds conversations, no plain texts"),
        ({}, "`document: text` needs objects with a text under 'text', found .*messages"),
    ],
    ids=["measured", "built in", "conversations"],
)
def test_what_holds_no_texts_is_refused(speculator, keys, message):
    with pytest.raises(ValueError, match=message):
        speculator.main(document="text", **keys)
