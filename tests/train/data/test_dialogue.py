"""A conversation while it is answered: which turns get an answer, where it ends, and what is kept of it. No model."""

import pytest

from headstart.train.data.dialogue import CUT_OFF, EMPTY, NO_REQUEST, TOO_LONG, Answer, Dialogue


def turns(text):
    """ "s u a" -> a system, a user and an assistant turn, told apart by their place."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[letter], "content": f"{letter}{place}"} for place, letter in enumerate(text.split())]


def answer_all(dialogue, answers=()):
    """Answer until it ends: with the Answers given, then with "new 0", "new 1" ...; returns the prompts' contents."""
    prompts, answers = [], list(answers)
    while dialogue.is_open:
        prompts.append([message["content"] for message in dialogue.prompt])
        dialogue.take(answers.pop(0) if answers else Answer(f"new {len(prompts) - 1}", "stop", 3))
    return prompts


@pytest.mark.parametrize(
    ("data", "prompts", "left_out"),
    [
        ("u a", ["u0"], 0),
        ("s u a u a", ["s0 u1", "s0 u1 new0 u3"], 0),
        ("u a u", ["u0", "u0 new0 u2"], 0),  # the last one asks, too
        ("u", ["u0"], 0),
        ("a u a", ["u1"], 1),  # a greeting answers nobody
        ("u a a u a", ["u0", "u0 new0 u3"], 1),
        ("u s a s", ["u0 s1"], 0),
        ("u u a", ["u0 u1"], 0),
    ],
)
def test_turns_that_are_asked_for_are_answered_behind_the_new_answers(data, prompts, left_out):
    dialogue = Dialogue(0, turns(data), seed=0)
    assert [" ".join(one).replace("new ", "new") for one in answer_all(dialogue)] == prompts
    record = dialogue.record()
    assert (record["ended"], record["left_out"]) == (None, left_out)
    roles = [message["role"] for message in record["messages"]]
    assert roles[-1] == "assistant"
    assert roles.count("assistant") == len(prompts)
    assert record["tokens"] == 3 * len(prompts)


@pytest.mark.parametrize("data", ["a", "s a", "a a"])
def test_conversation_without_a_user_turn_is_not_open(data):
    dialogue = Dialogue(0, turns(data), seed=0)
    assert not dialogue.is_open
    assert dialogue.record() | {"left_out": 0} == dict(
        messages=[], tokens=0, steps=0, accepted=0, left_out=0, ended=NO_REQUEST, detail=None
    )


def test_answer_cut_off_is_marked_and_ends_its_conversation():
    dialogue = Dialogue(0, turns("u a u a u a"), seed=0)
    answer_all(dialogue, [Answer("whole", "stop"), Answer("half a charac\ufffd", "length")])
    record = dialogue.record()
    assert record["messages"][1] == {"role": "assistant", "content": "whole", "finish_reason": "stop"}
    assert record["messages"][3:] == [{"role": "assistant", "content": "half a charac", "finish_reason": "length"}]
    assert (record["ended"], record["left_out"]) == (CUT_OFF, 1)


def test_last_answer_cut_off_ends_nothing_early():
    dialogue = Dialogue(0, turns("u a"), seed=0)
    answer_all(dialogue, [Answer("half", "length")])
    assert dialogue.record()["ended"] is None


@pytest.mark.parametrize("empty", [Answer("", "stop", 1), Answer(" \n", "stop", 1), Answer("\ufffd", "length", 1)])
def test_conversation_ends_before_an_empty_answer(empty):
    dialogue = Dialogue(0, turns("u a u a u a"), seed=0)
    answer_all(dialogue, [Answer("whole", "stop", 5), empty])
    record = dialogue.record()
    assert [message["content"] for message in record["messages"]] == ["u0", "whole"]
    assert (record["ended"], record["left_out"], record["tokens"]) == (EMPTY, 2, 6)


def test_what_cannot_be_answered_keeps_the_turns_before():
    dialogue = Dialogue(0, turns("u a u a"), seed=0)
    dialogue.take(Answer("whole", "stop"))
    dialogue.end(TOO_LONG, "why")
    record = dialogue.record()
    assert [message["content"] for message in record["messages"]] == ["u0", "whole"]
    assert (record["ended"], record["detail"], record["left_out"]) == (TOO_LONG, "why", 1)
    first = Dialogue(0, turns("u a u a"), seed=0)
    first.end(TOO_LONG)
    assert (first.record()["messages"], first.record()["left_out"]) == ([], 2)


def test_seeds_come_from_the_place_alone():
    def seeds(index, seed, answer):
        dialogue, found = Dialogue(index, turns("u a u a u a"), seed), []
        while dialogue.is_open:
            found.append(dialogue.next_seed)
            dialogue.take(Answer(answer, "stop"))
        return found

    assert seeds(3, 0, "one") == seeds(3, 0, "other")
    everything = [one for index in range(50) for seed in range(5) for one in seeds(index, seed, "x")]
    assert len(set(everything)) == len(everything)
    assert max(everything) < 2**31
