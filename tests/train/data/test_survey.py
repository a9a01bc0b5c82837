"""`headstart data`: what it says of a data set is so."""

import json

import pytest
from transformers import AutoTokenizer

from headstart.cli import main
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_places
from headstart.train.data.rows import build_rows
from headstart.train.data.survey import survey


def message(role, content, **fields):
    return {"role": role, "content": content, **fields}


RECORDS = [
    {"messages": [message("system", "w1"), message("user", "w2 w3"), message("assistant", "w4")]},
    {
        "messages": [
            message("user", "w2"),
            message("assistant", "w4 w5"),
            message("user", "w1"),
            message("assistant", "w5"),
        ]
    },
    {"messages": [message("user", "w2"), message("assistant", "w4", finish_reason="length")]},
    {"messages": [message("user", "w2"), message("assistant", "w4")], "tools": [{"name": "f"}]},
    {"messages": [message("user", "w2"), message("assistant", "w4", reasoning_content="w9 w9")]},
    {
        "messages": [
            message("user", "w2"),
            message("assistant", "w4"),
            message("user", "w1"),
            message("assistant", "w4", weight=0),
        ]
    },
    {"prompt": "w2", "completion": "w4"},
    {"prompt": "w2", "completion": "w4"},
    *[{"instruction": f"w{n}", "output": "w4"} for n in range(8)],
    {"text": "nothing"},
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)) + "\n")
    return str(path)


def test_conversations_are_counted(data):
    found = survey(data)
    assert found["conversations"] == 16
    assert found["messages"] == {"user": 18, "assistant": 18, "system": 1}
    assert found["conversations with"] == {
        "the same words as another": 3,  # cut off or not, by TRL's keys or by Alpaca's
        "a system message": 1,
        "an answer that was cut off": 1,
        "tools": 1,
        "thoughts": 1,
        "an answer of weight 0": 1,
    }
    assert found["sizes"]["answers"] == {"least": 1, "p50": 1, "p90": 2, "p99": 2, "most": 2, "sum": 18}
    assert found["sizes"]["characters"]["most"] == 11
    (left_out,) = found["notes"]
    assert "1 of 17 records are left out: 1 without turns" in left_out
    assert "rows" not in found


def test_tokens_are_those_that_a_trainer_packs(data, word_target):
    tokenizer, loaded = AutoTokenizer.from_pretrained(word_target), load_conversations(data)
    documents, places = encode_places(tokenizer, loaded, rules=2, row_length=7)
    packed, counts = build_rows(documents, 7, 0, print)
    found = survey(data, word_target, 7)
    assert found["encoded"] == len(loaded) == places[-1] + 1
    assert found["documents"] == len(documents) > len(loaded)
    assert found["sizes"]["tokens"]["sum"] == documents.lengths.sum()
    assert found["sizes"]["supervised tokens"]["sum"] == documents.supervised.sum()
    assert found["rows"]["labels"] == counts.sum()
    assert found["rows"]["rows"] == len(packed)
    assert found["rows"]["longer than a row"] == packed.num_cut > 0
    assert found["rows"]["tokens cut off"] == sum(max(length - 7, 0) for length in documents.lengths)
    assert any("does not write the thoughts of 1 of 1" in note for note in found["notes"])


def test_it_prints_text_or_json(data, word_target, capsys):
    assert main(["data", data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == survey(data)
    assert main(["data", data, "--tokenizer", word_target, "--row-length", "7"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{data}: 16 conversations\nmessages: 18 user, 18 assistant, 1 system\n")
    assert "rows of 7 tokens hold" in said
    assert "left out: 1 without turns" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl"], "the data file nowhere.jsonl cannot be read"),
        (["stdlib", "--row-length", "1"], "--row-length must be at least 2, got 1"),
        (["stdlib", "--tokenizer", "./nowhere"], "nowhere"),
    ],
)
def test_what_it_cannot_read_is_said(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    assert message in capsys.readouterr().err
