"""Conversations from every source become the same messages, and what is wrong with one is said by file and line."""

import gzip
import json
import sys

import pytest

from headstart.train.data.conversations import load_conversations, write_conversations


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_both_shapes_and_all_role_names_become_the_same_messages(tmp_path):
    sharegpt = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"},
        ]
    }
    openai = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "a"},
        ]
    }
    expected = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "q"), ("assistant", "a"))]
    assert load_conversations(write(tmp_path / "a.jsonl", sharegpt, "", openai)) == [expected, expected]
    assert load_conversations(write(tmp_path / "a.json", [sharegpt, openai])) == [expected, expected]


def test_answer_cut_off_stays_marked_and_prompts_alone_can_be_asked_for(tmp_path):
    cut = {"role": "assistant", "content": "a", "finish_reason": "length"}
    whole = {"role": "assistant", "content": "b", "finish_reason": "stop"}
    user = {"role": "user", "content": "q", "finish_reason": None}
    path = write(tmp_path / "a.jsonl", {"messages": [user, cut, user, whole]}, {"messages": [user]})
    plain = {"role": "user", "content": "q"}
    first = [plain, cut, plain, {"role": "assistant", "content": "b"}]
    assert load_conversations(path, answered=False) == [first, [plain]]
    with pytest.raises(ValueError, match="line 2: a conversation without an assistant turn"):
        load_conversations(path)


def test_builtin_set_gives_its_splits(stdlib_source, monkeypatch):
    monkeypatch.setattr("headstart.train.data.stdlib_pairs.stdlib_source_pairs", lambda: stdlib_source)
    train, heldout = load_conversations("stdlib"), load_conversations("stdlib:heldout")
    assert len(train) > 5 * len(heldout) > 500
    assert [turn["role"] for turn in train[0]] == ["user", "assistant"]
    with pytest.raises(ValueError, match="split 'validation'"):
        load_conversations("stdlib:validation")


GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"bad\.jsonl, line 3: not JSON"),
        ({"text": "just text"}, r"bad\.jsonl, line 3: expected an object with a list.*just text"),
        ({"messages": []}, r"bad\.jsonl, line 3: expected"),
        ("[1, 2]", r"bad\.jsonl, line 3: expected"),
        (
            {"messages": [{"role": "user", "content": "alone"}]},
            r"bad\.jsonl, line 3: .*without an assistant turn.*alone",
        ),
        ({"messages": [{"role": "narrator", "content": "x"}]}, r"line 3: a turn needs a role, one of .*narrator"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"line 3: a turn needs a role.*null"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"line 3: a turn needs .*image"),
    ],
)
def test_broken_line_is_an_error_that_names_file_and_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        load_conversations(write(tmp_path / "bad.jsonl", GOOD, "", line))


def test_a_few_records_without_use_are_left_out_and_counted(tmp_path):
    """As the sets of the Hub hold them; of more than a tenth the first is an error."""
    user, answer = GOOD["messages"]
    empty = [
        {"conversations": []},
        {"messages": [user]},
        {"messages": [user, {"role": "assistant", "content": " "}]},
        {"messages": [user, {"role": ["user"], "content": "x"}, answer]},
        {"messages": [user, {"role": "assistant", "content": None, "tool_calls": []}]},
    ]
    odd = [
        {"messages": None, "conversations": [{"from": "User", "value": "q"}, {"from": "bing", "value": "a"}]},
        {"messages": [{"role": "developer", "content": "s"}, user, answer]},
    ]
    said, good = [], [GOOD] * 43
    path = write(tmp_path / "a.jsonl", *good, *empty, *odd)
    found = load_conversations(path, note=said.append)
    system = {"role": "system", "content": "s"}
    assert found == [GOOD["messages"]] * 43 + [[user, answer], [system, user, answer]]
    (text,) = said
    assert (
        "5 of 50 records are left out: 2 without an answer, 1 without turns, 1 with a turn of another role, 1 with a"
        in text
    )
    assert "The first: " in text
    assert "line 44: expected an object" in text
    with pytest.raises(ValueError, match=r"line 43: expected an object .*\n.*of 49 records 2 without an answer"):
        load_conversations(write(tmp_path / "b.jsonl", *good[1:], *empty, *odd))


def test_last_line_of_a_file_that_was_cut_is_left_out_and_counted(tmp_path):
    """Even within a character; with a line end after it, the line was written so."""
    path, said = tmp_path / "a.jsonl", []
    whole = "".join(json.dumps(GOOD) + "\n" for _ in range(10)).encode()
    last = json.dumps({"messages": [{"role": "user", "content": "é"}]}, ensure_ascii=False).encode()
    for end in (20, last.index("é".encode()) + 1):
        path.write_bytes(whole + last[:end])
        assert load_conversations(str(path), note=said.append) == [GOOD["messages"]] * 10
        assert "1 of 11 records are left out: 1 cut off, the last line of the file. The first: " in said[-1]
        assert "line 11: not JSON" in said[-1]
    path.write_bytes(whole + last[:20] + b"\n")
    with pytest.raises(ValueError, match="line 11: not JSON"):
        load_conversations(str(path))


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FIELDS = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "messages": [
        {"role": "user", "content": "q", "weight": 1},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm", "weight": 0},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "assistant", "content": "a", "reasoning_content": "so", "weight": 1},
    ],
}


def test_fields_of_messages_are_kept_for_the_template(tmp_path):
    first, call, result, _ = FIELDS["messages"]
    function = {"name": "f", "arguments": {"a": 1}}
    expected = [
        {"role": "user", "content": "q", "tools": FIELDS["tools"]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{**CALL, "function": function}],
            "weight": 0,
        },
        result,
        {"role": "assistant", "content": "a", "reasoning_content": "so"},
    ]
    said = []
    as_text = {**FIELDS, "tools": json.dumps(FIELDS["tools"])}
    found = load_conversations(write(tmp_path / "a.jsonl", FIELDS, as_text), note=said.append)
    assert found == [expected] * 2
    assert said == []
    write_conversations(tmp_path / "b.jsonl", found)
    assert load_conversations(str(tmp_path / "b.jsonl")) == found
    assert json.loads((tmp_path / "b.jsonl").read_text().split("\n")[0])["tools"] == FIELDS["tools"]
    # Answers of weight 0 teach nothing; however many there are, that is no fault.
    path = write(tmp_path / "c.jsonl", {"messages": [first, call]}, GOOD)
    assert load_conversations(path, note=said.append) == [GOOD["messages"]]
    assert "1 of 2 records are left out: 1 whose answers all have weight 0. The first: " in said[0]


def test_fields_of_another_shape_are_counted(tmp_path):
    user, answer = GOOD["messages"]
    odd = {**answer, "weight": 0.5, "tool_calls": "f()", "function_call": {"name": "f"}, "reasoning": ["hm"]}
    said = []
    path = write(tmp_path / "a.jsonl", {"messages": [user, odd], "tools": "clock"}, GOOD)
    assert load_conversations(path, note=said.append) == [GOOD["messages"]] * 2
    (text,) = said
    assert "fields of messages and records that are left out: " in text
    for name in ("function_call", "tool_calls", "reasoning_content", "tools", "weight other than 0 and 1"):
        assert f"1 {name}" in text


def test_fields_can_be_left_out_which_is_counted(tmp_path):
    """As a run that was begun before they were kept read them, and as answers are made anew."""
    user, answer = GOOD["messages"]
    thought = {"messages": [user, {**answer, "reasoning_content": "hm", "weight": 0}], "tools": FIELDS["tools"]}
    said = []
    path = write(tmp_path / "a.jsonl", *[GOOD] * 9, thought, FIELDS)
    assert load_conversations(path, note=said.append, with_fields=False) == [GOOD["messages"]] * 10
    assert "1 of 11 records are left out: 1 with a turn without text" in said[0]
    assert said[1].endswith("left out: 1 tools, 1 reasoning_content, 1 weight")


def test_half_a_character_becomes_the_sign_for_one(tmp_path):
    line = (
        '{"messages": [{"role": "user", "content": "q \\ud83d"}, {"role": "assistant", "content": "\\ud83d\\ude00"}]}'
    )
    (messages,) = load_conversations(write(tmp_path / "a.jsonl", line))
    assert [message["content"] for message in messages] == ["q \ufffd", "\U0001f600"]


def test_broken_json_file_names_the_place(tmp_path):
    with pytest.raises(ValueError, match=r"bad\.json, line 2: not JSON"):
        load_conversations(write(tmp_path / "bad.json", "[", "oops]"))
    with pytest.raises(ValueError, match="expected a JSON list"):
        load_conversations(write(tmp_path / "bad.json", GOOD))
    with pytest.raises(ValueError, match=r"line 2: not JSON .*one object per line\? then name it \.jsonl"):
        load_conversations(write(tmp_path / "bad.json", GOOD, GOOD))
    with pytest.raises(ValueError, match=r"item 2.*without an assistant turn"):
        load_conversations(write(tmp_path / "bad.json", [GOOD, {"messages": GOOD["messages"][:1]}]))


def test_missing_empty_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read: No such file"):
        load_conversations(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no conversations"):
        load_conversations(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ValueError, match="no split 'test'"):
        load_conversations(write(tmp_path / "good.jsonl", GOOD) + ":test")
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl is not UTF-8"):
        load_conversations(str(tmp_path / "latin.jsonl"))
    with pytest.raises(ValueError, match=r"the data folder .*nowhere does not exist"):
        load_conversations(str(tmp_path / "nowhere"))


def test_dataset_folders_load_whether_saved_or_made_of_jsonl(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    other = {"messages": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]}
    datasets.Dataset.from_list([GOOD, other]).save_to_disk(tmp_path / "saved")
    splits = {"train": datasets.Dataset.from_list([GOOD]), "test": datasets.Dataset.from_list([other])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    (tmp_path / "lines").mkdir()
    write(tmp_path / "lines" / "train.jsonl", GOOD, other)
    both = [GOOD["messages"], other["messages"]]
    datasets.Dataset.from_list([GOOD, other]).to_parquet(tmp_path / "one.parquet")
    assert load_conversations(str(tmp_path / "one.parquet")) == both
    assert load_conversations(str(tmp_path / "saved")) == both
    assert load_conversations(str(tmp_path / "lines")) == both
    assert load_conversations(f"{tmp_path / 'splits'}:test") == both[1:]
    with pytest.raises(ValueError, match=r"no split 'dev', only train, test: name one, as .*splits:train"):
        load_conversations(f"{tmp_path / 'splits'}:dev")
    with pytest.raises(ValueError, match="saved as one split"):
        load_conversations(f"{tmp_path / 'saved'}:test")


def test_dataset_that_cannot_be_loaded_says_what_data_may_be(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"'nobody/nothing' cannot be loaded.*needs the network"):
        load_conversations("nobody/nothing")  # the tests run offline
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_conversations(str(tmp_path / "empty"))


SAID = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "q", "completion": "a"}, SAID),
        ({"prompt": [SYSTEM, SAID[0]], "completion": [SAID[1]]}, [SYSTEM, *SAID]),
        ({"instruction": "q", "output": "a", "input": ""}, SAID),
        (
            {"instruction": "q", "output": "a", "input": "x", "system": "s"},
            [SYSTEM, {**SAID[0], "content": "q\n\nx"}, SAID[1]],
        ),
        ({"messages": SAID, "prompt": "q2", "completion": "b"}, SAID),
        ({"messages": [], "prompt": "q", "completion": "a"}, SAID),
    ],
)
def test_prompts_with_completions_and_instructions_become_messages(tmp_path, record, expected):
    assert load_conversations(write(tmp_path / "a.jsonl", record)) == [expected]


@pytest.mark.parametrize(
    "record",
    [{"prompt": "q"}, {"prompt": "q", "completion": None}, {"prompt": "q", "completion": ["a"]}, {"output": "a"}],
)
def test_half_of_a_shape_is_none(tmp_path, record):
    with pytest.raises(
        ValueError,
        match=r"line 1: (expected an object with a list under 'messages'.*'instruction' and 'output'|a turn)",
    ):
        load_conversations(write(tmp_path / "a.jsonl", record))


def test_compressed_files_and_patterns_are_read_in_the_order_of_their_names(tmp_path):
    def numbered(number):
        return {"messages": [{"role": "user", "content": str(number)}, SAID[1]]}

    write(tmp_path / "b.jsonl", numbered(1), numbered(2))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(numbered(3)).encode() + b"\r\n"))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps([numbered(0)]).encode()))
    found = load_conversations(str(tmp_path / "*"))
    assert [messages[0]["content"] for messages in found] == ["0", "1", "2", "3"]
    assert len(load_conversations(str(tmp_path / "?.jsonl*"))) == 3
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"{" * 999)[:-12])
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz cannot be read: Compressed file ended"):
        load_conversations(str(tmp_path / "c.jsonl.gz"))
    with pytest.raises(ValueError, match=r"b\.jsonl is one file and has no split 'test'"):
        load_conversations(f"{tmp_path}/b*:test")
    with pytest.raises(ValueError, match=r"no file matches the pattern .*nothing"):
        load_conversations(str(tmp_path / "nothing*.jsonl"))


def test_zstandard_is_asked_for_where_a_file_needs_it(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"no zstd")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(ValueError, match="need the `zstandard` library"):
            load_conversations(str(path))
    zstandard = pytest.importorskip("zstandard")
    with pytest.raises(ValueError, match="cannot be read: no zstd file"):
        load_conversations(str(path))
    frames = [zstandard.compress(json.dumps({"messages": SAID}).encode() + b"\n") for _ in range(2)]
    path.write_bytes(b"".join(frames))
    assert load_conversations(str(path)) == [SAID, SAID]


def test_missing_datasets_library_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the `datasets` library"):
        load_conversations("somebody/something")
