"""What a run is measured on and what it trains on: train/data/held_out.py."""

import json
import shutil
from types import SimpleNamespace

import pytest

from headstart.train import medusa
from headstart.train.data import held_out as held_out_module
from headstart.train.data.conversations import load_conversations
from headstart.train.data.held_out import are_shipped, choose_held_out
from headstart.train.data.sources.records import BUILT_IN

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def choose(conversations, count, *, data, eval_data="", target="target", note=print):
    return choose_held_out(conversations, count, data=data, eval_data=eval_data, target=target, note=note)


def test_held_out_conversations_are_never_trained_on(conversations):
    loaded = load_conversations(conversations)
    train, held_out = choose([*loaded, *loaded], 7, data=conversations)
    assert len(held_out) == 7
    assert not [one for one in train if one in held_out]
    again = choose(loaded[::-1], 5, data=conversations)[1]
    assert all(one in held_out for one in again)


def test_what_is_trained_on_is_not_measured_on(conversations, tmp_path):
    loaded, said = load_conversations(conversations), []
    path = tmp_path / "eval.jsonl"
    path.write_text("\n".join(json.dumps({"messages": one}) for one in (loaded[3], MESSAGES, loaded[5])))
    assert choose(loaded, 16, data=conversations, eval_data=str(path), note=said.append) == (loaded, [MESSAGES])
    assert said == ["eval_data: 2 of 3 conversations are also in the training data and are left out"]
    with pytest.raises(
        ValueError, match=f"all {len(loaded)} conversations of eval_data .* are also in the training data"
    ):
        choose(loaded, 16, data=conversations, eval_data=conversations, note=said.append)


def test_a_built_in_set_is_measured_on_its_held_out_part(monkeypatch):
    monkeypatch.setattr(held_out_module, "load_conversations", lambda data, **_: [[{"role": "user", "content": data}]])
    assert choose([MESSAGES], 16, data="x", eval_data="stdlib")[1] == [[{"role": "user", "content": "stdlib:heldout"}]]


def test_stdlib_is_measured_on_what_the_target_ships(tmp_path):
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"messages": MESSAGES, "module": "m"}))
    train, held_out = choose([["x"]], 16, data="stdlib", target=str(tmp_path))
    assert (train, held_out) == ([["x"]], [MESSAGES])


def test_a_split_named_is_the_set_it_is_of(tmp_path, monkeypatch):
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    for data in ("stdlib", "stdlib:train"):
        assert choose([["x"]], 16, data=data, target=str(tmp_path)) == ([["x"]], [MESSAGES])
        assert are_shipped(data, "", str(tmp_path))
        assert not are_shipped(data, "other.jsonl", str(tmp_path))
        assert not are_shipped(data, "", str(tmp_path / "elsewhere"))
    assert not are_shipped("stdlib:heldout", "", str(tmp_path))
    monkeypatch.setattr(held_out_module, "load_conversations", lambda data: [[data]])
    assert choose([["x"]], 16, data="stdlib:train", target="elsewhere")[1] == [["stdlib:heldout"]]


def test_the_same_words_cut_off_or_not_are_the_same_conversation(tmp_path):
    path, cut = tmp_path / "eval.jsonl", [MESSAGES[0], {**MESSAGES[1], "finish_reason": "length"}]
    path.write_text(json.dumps({"messages": MESSAGES}))
    with pytest.raises(ValueError, match="all 1 conversations of eval_data"):
        choose([cut], 16, data="x", eval_data=str(path))


def test_of_conversations_with_the_same_words_the_last_is_held_out(conversations):
    loaded = load_conversations(conversations)
    cut = [[*messages[:-1], messages[-1] | {"finish_reason": "length"}] for messages in loaded]
    assert choose([*loaded, *cut], 5, data=conversations)[1] == choose(cut, 5, data=conversations)[1]
    assert choose([*cut, *loaded], 5, data=conversations)[1] == choose(loaded, 5, data=conversations)[1]


def test_requests_that_are_trained_on_with_other_answers_are_told(tmp_path):
    path, said = tmp_path / "eval.jsonl", []
    other = [{"role": "user", "content": "c"}, MESSAGES[1]]
    path.write_text("\n".join(json.dumps({"messages": one}) for one in (MESSAGES, other)))
    answered = [MESSAGES[0], {"role": "assistant", "content": "another"}]
    assert choose([answered], 16, data="x", eval_data=str(path), note=said.append)[1] == [MESSAGES, other]
    assert said == [
        "eval_data: 1 of the 2 held-out conversations are in the data with other answers: acceptance may be measured too high"
    ]


def test_only_what_is_measured_on_and_was_asked_is_told(tmp_path):
    path, said = tmp_path / "eval.jsonl", []
    other = [{"role": "user", "content": "c"}, MESSAGES[1]]
    alone = [{"role": "assistant", "content": "by itself"}]
    path.write_text("\n".join(json.dumps({"messages": one}) for one in (other, alone, MESSAGES)))
    trained = [[MESSAGES[0], {"role": "assistant", "content": "another"}], [{"role": "assistant", "content": "alone"}]]
    assert choose(trained, 2, data="x", eval_data=str(path), note=said.append)[1] == [other, alone]
    assert said == []


def test_the_split_of_runs_under_way_stays():
    """A resumed run needs the same rows: the hash that chooses them may not change."""
    conversations = [[{"role": "user", "content": str(i)}, {"role": "assistant", "content": "b"}] for i in range(20)]
    held_out = choose(conversations, 4, data="x.jsonl")[1]
    assert [one[0]["content"] for one in held_out] == ["14", "19", "4", "8"]


# ---- what a run keeps of it ----


def test_a_run_keeps_the_conversations_it_held_out(arguments, conversations, tmp_path):
    assert medusa.main(arguments(eval_prompts=5, eval_tokens=8, max_steps=1)) == 0
    held_out = load_conversations(str(tmp_path / "run" / "heldout.jsonl"))
    everything = load_conversations(conversations)
    assert len(held_out) == 5
    assert all(conversation in everything for conversation in held_out)


def test_a_run_on_a_built_in_set_keeps_what_its_target_does_not_ship(arguments, conversations, tmp_path, monkeypatch):
    examples = load_conversations(conversations)
    pairs = {"train": examples[:8], "heldout": examples[8:10]}
    built_in = [SimpleNamespace(conversation=lambda one=one: one) for one in pairs["train"]]
    held_out = [SimpleNamespace(conversation=lambda one=one: one) for one in pairs["heldout"]]
    monkeypatch.setitem(BUILT_IN, "tiny", lambda split: built_in if split == "train" else held_out)
    given = arguments(data="tiny", eval_prompts=2, eval_tokens=8, max_steps=1)
    target = shutil.copytree(given[given.index("--target") + 1], tmp_path / "target")
    given[given.index("--target") + 1] = str(target)
    path, kept = tmp_path / "eval.jsonl", tmp_path / "run" / "heldout.jsonl"
    path.write_text("\n".join(json.dumps({"messages": one}) for one in examples[20:22]))
    assert medusa.main(given) == 0
    assert load_conversations(str(kept)) == pairs["heldout"]
    assert medusa.main([*given, "--resume", "--max_steps", "2", "--eval_data", str(path)]) == 0
    assert load_conversations(str(kept)) == examples[20:22]
    (target / "heldout.jsonl").write_text(path.read_text())
    assert medusa.main([*given, "--resume", "--max_steps", "3"]) == 0
    assert not kept.exists(), "what the target ships is read there"
