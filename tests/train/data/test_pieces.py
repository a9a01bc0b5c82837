"""Conversations longer than a row are split at turns; on request each answer is a document of its own."""

import random

import numpy as np
import pytest
from transformers import AutoTokenizer

from headstart.tests.train.data.chat_templates import STYLES, byte_tokenizer
from headstart.tests.train.data.test_encoding import CHATML, MARKED, make_tokenizer
from headstart.train.data import encoding
from headstart.train.data.conversations import load_conversations, write_conversations
from headstart.train.data.encoding import encode_conversations, encode_places
from headstart.train.data.packed.parts import Parts
from headstart.train.data.packed.pieces import latest_turns, split_at_turns
from headstart.train.data.rows import build_rows, choose_documents

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]


def exchange(number, length):
    """A request of `length` letters and its answer."""
    return [{"role": "user", "content": f"{number}?" + "q" * length}, {"role": "assistant", "content": f"A{number}."}]


def conversation(lengths, *before):
    return [*before, *(message for number, length in enumerate(lengths) for message in exchange(number, length))]


def encode(tokenizer, conversations, **how):
    return encode_places(tokenizer, conversations, **{"rules": 2, "row_length": 100} | how)


def text_of(tokenizer, document):
    ids, supervised = document
    return tokenizer.decode(ids), tokenizer.decode([token for token, mark in zip(ids, supervised) if mark])


@pytest.mark.parametrize("before", [[], [SYSTEM]], ids=["", "system"])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["rendering", "markers"])
def test_a_long_conversation_becomes_pieces_of_whole_exchanges_as_many_as_fit(template, before):
    tokenizer, dice = make_tokenizer(template), random.Random(0)
    for _ in range(5):
        lengths = [dice.randrange(60) for _ in range(dice.randrange(2, 20))]
        messages, row_length = conversation(lengths, *before), dice.randrange(120, 400)
        documents, places = encode(tokenizer, [messages], row_length=row_length)
        assert places.tolist() == [0] * len(documents)

        def rendered(first, last, turns=conversation(lengths)):  # noqa: B008
            return encode_conversations(tokenizer, [[*before, *turns[2 * first : 2 * last]]])[0]

        first, expected = 0, []  # each piece takes exchange after exchange
        while first < len(lengths):
            last = first + 1
            while last < len(lengths) and len(rendered(first, last + 1)[0]) <= row_length:
                last += 1
            expected.append(rendered(first, last))
            first = last
        assert list(documents) == expected
        said = "".join(text_of(tokenizer, one)[1] for one in documents)
        assert said == "".join(f"A{number}.<|im_end|>" for number in range(len(lengths)))


def test_what_fits_is_not_changed_and_the_rules_of_older_runs_split_nothing(word_target, conversations):
    tokenizer, loaded = AutoTokenizer.from_pretrained(word_target), load_conversations(conversations)
    longest = int(encode_conversations(tokenizer, loaded).lengths.max())
    assert encode(tokenizer, loaded, row_length=longest)[0] == encode_conversations(tokenizer, loaded)
    turns = [[*one, *other] for one, other in zip(loaded[::2], loaded[1::2])]
    assert encode(tokenizer, turns, row_length=longest, rules=1)[0] == encode_conversations(tokenizer, turns)
    assert len(encode(tokenizer, turns, row_length=longest)[0]) > len(turns)


def test_an_exchange_longer_than_a_row_is_cut_and_counted():
    tokenizer, told = make_tokenizer(CHATML), []
    documents, _ = encode(tokenizer, [conversation([3, 200, 3], SYSTEM), exchange(9, 200)], note=told.append)
    assert documents.lengths.tolist() == [len(encode_conversations(tokenizer, [one])[0][0]) for one in (
        conversation([3], SYSTEM), conversation([200], SYSTEM), conversation([3], SYSTEM), exchange(9, 200)
    )]  # fmt: skip
    assert "1 conversations longer than 100 tokens are split at turns, into 3" in told
    rows, _ = build_rows(documents, 100, 0, told.append)
    assert rows.num_cut == 2
    assert "2 longer than a row were cut" in told[-1]


def test_pieces_keep_tools_and_tool_calls_keep_together():
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "clock"}}]}
    result = {"role": "tool", "content": "12:00"}
    messages = [{**exchange(0, 9)[0], "tools": TOOLS}, called, result, {"role": "assistant", "content": "Noon."}]
    messages += conversation([5])
    pieces = split_at_turns(messages, lambda part: False, 0.5)
    assert pieces == [messages[:4], [{**messages[4], "tools": TOOLS}, messages[5]]]
    pieces = split_at_turns([{**SYSTEM, "tools": TOOLS}, *messages[1:4], *messages[4:]], lambda part: False, 0.5)
    assert [piece[0] for piece in pieces] == [{**SYSTEM, "tools": TOOLS}] * 2


def test_pieces_whose_answers_do_not_count_are_left_out():
    messages = conversation([50, 50, 50])
    messages[3]["weight"] = 0
    documents, _ = encode(make_tokenizer(CHATML), [[*messages, {"role": "user", "content": "q" * 80}]])
    assert [text_of(make_tokenizer(CHATML), one)[1] for one in documents] == ["A0.<|im_end|>", "A2.<|im_end|>"]


def test_a_conversation_whose_pieces_the_template_refuses_is_cut():
    refusing = "{% if messages[0]['content'][0] != '0' %}{{ raise_exception('no') }}{% endif %}" + MARKED
    tokenizer, told = make_tokenizer(refusing), []
    documents, _ = encode(tokenizer, [conversation([50, 50, 50])], note=told.append)
    assert documents.lengths.tolist() == [len(encode_conversations(tokenizer, [conversation([50, 50, 50])])[0][0])]
    assert told == []


@pytest.mark.parametrize("style", STYLES)
def test_each_answer_is_a_document_that_begins_as_the_server_would_ask_for_it(style):
    tokenizer = byte_tokenizer(STYLES[style].template, STYLES[style].special)
    turns = [("One?", "Un.", "French."), ("Two?", "Deux.", "Again."), ("Three?", "Trois.", "Once more.")]
    messages = []
    for request, answer, thoughts in turns:
        messages += [{"role": "user", "content": request}]
        messages += [{"role": "assistant", "content": answer, "reasoning_content": thoughts}]
    documents, places = encode(tokenizer, [messages, messages[:2]], document="answer", row_length=1000)
    assert places.tolist() == [0, 0, 0, 1]
    assert documents[3] == documents[0]
    for turn, document in enumerate(list(documents)[:3]):
        text, supervised = text_of(tokenizer, document)
        asked = tokenizer.apply_chat_template(messages[: 2 * turn + 1], tokenize=False, add_generation_prompt=True)
        finished = tokenizer.apply_chat_template(messages[: 2 * turn + 2], tokenize=False)
        if style == "DeepSeek-R1-Distill":  # which drops the thoughts that its generation prompt opens
            finished = f"{asked}{turns[turn][2]}\n</think>\n\n{turns[turn][1]}{tokenizer.eos_token}"
        assert text == finished
        assert turns[turn][1] in supervised
        assert not any(answer in supervised for _, answer, _ in turns[:turn])
        if finished.startswith(asked):
            assert supervised
            assert finished[len(asked) :].startswith(supervised)
        if style in ("Qwen3-Thinking", "DeepSeek-R1-Distill"):
            assert turns[turn][2] in supervised
            assert not any(thoughts in text for _, _, thoughts in turns[:turn])


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("Hm.\n</think>\n\nUn.", "Hm.\n</think>\n\nUn."),  # as the model wrote it
        ("<think>\nHm.</think>Un.", "Hm.</think>Un."),
        ("Un.", None),
    ],
)
@pytest.mark.parametrize("cut", [False, True], ids=["", "cut off"])
def test_thoughts_that_a_template_drops_follow_the_prompt_that_opens_them(content, written, cut):
    tokenizer = byte_tokenizer(STYLES["DeepSeek-R1-Distill"].template, STYLES["DeepSeek-R1-Distill"].special)
    asked = {"role": "user", "content": "One?"}
    answer = {"role": "assistant", "content": content} | ({"finish_reason": "length"} if cut else {})
    (document,), _ = encode(tokenizer, [[asked, answer]], document="answer")
    text, supervised = text_of(tokenizer, document)
    prompt = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    if written is None:  # without thoughts, what the template writes
        assert text == tokenizer.apply_chat_template([asked, answer], tokenize=False)
        assert supervised == ("Un." if cut else "Un." + tokenizer.eos_token)
    else:
        assert supervised == written + ("" if cut else tokenizer.eos_token)
        assert text == prompt + supervised


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["rendering", "markers"])
def test_only_the_documents_own_answer_is_supervised(template):
    messages = conversation([1, 2, 3, 4, 5])
    messages[3] |= {"weight": 0}
    messages[5] |= {"finish_reason": "length"}
    messages[7] |= {"content": ""}
    tokenizer = make_tokenizer(template)
    documents, _ = encode(tokenizer, [messages], document="answer", row_length=1000)
    assert [text_of(tokenizer, one)[1] for one in documents] == ["A0.<|im_end|>", "A2.", "A4.<|im_end|>"]


def test_a_document_of_an_answer_that_is_longer_than_a_row_loses_its_first_turns():
    tokenizer, told = make_tokenizer(CHATML), []
    messages = conversation([10, 10, 10, 200, 3], SYSTEM)
    two = len(encode_conversations(tokenizer, [messages[:5]])[0][0])
    documents, _ = encode(tokenizer, [messages], document="answer", row_length=two, note=told.append)
    kept = [(0, 1), (0, 2), (1, 3), (3, 4), (4, 5)]  # exchanges of each document
    parts = [[SYSTEM, *messages[1:][2 * first : 2 * last]] for first, last in kept]
    whole = encode_conversations(tokenizer, parts)
    assert [ids for ids, _ in documents] == [ids for ids, _ in whole]
    assert [text_of(tokenizer, one)[1] for one in documents] == [f"A{n}.<|im_end|>" for n in range(5)]
    assert told == [f"3 answers lose the first turns before them, so that they fit into {two} tokens"]


def test_documents_of_a_conversation_stay_together_in_the_order_of_conversations(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH", 5)
    tokenizer = make_tokenizer(CHATML)
    many = [conversation([number % 7] * (number % 4 + 1)) for number in range(24)]
    for document in ("conversation", "answer"):
        documents, places = encode(tokenizer, many, document=document)
        assert len(documents) > len(many)
        packed = encode(tokenizer, many, document=document, workers=2, parts=Parts(tmp_path / document))
        assert packed[0] == documents
        assert packed[1].tolist() == places.tolist()
        chosen = choose_documents(tokenizer, many, 100, 0, 3, rules=2, document=document)
        order = np.arange(24).tolist()
        random.Random(3).shuffle(order)
        assert list(chosen) == [documents[i] for place in order for i in np.flatnonzero(places == place)]
        some = choose_documents(tokenizer, many, 100, 0, 3, rules=2, document=document, max_examples=6)
        assert list(some) == list(chosen)[: len(some)]
        assert len(some) == sum(int((places == place).sum()) for place in order[:6])


def test_a_run_says_what_it_did_to_long_conversations(trainer, conversations, tmp_path, capsys):
    loaded, data = load_conversations(conversations), tmp_path / "long.jsonl"
    write_conversations(data, [[*one, *other] for one, other in zip(loaded[::2], loaded[1::2])])
    trainer.run(data=data, max_steps=1, row_length=40, output=tmp_path / "a")
    told = capsys.readouterr().err
    assert "conversations longer than 40 tokens are split at turns" in told
    assert ", 0 rows without a label left out" in told
    trainer.run(data=data, max_steps=1, row_length=40, document="answer", output=tmp_path / "b")
    assert "60 documents in" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 3])
def test_what_is_expected_to_fit_decides_nothing(share):
    messages, dice = conversation([1] * 30, SYSTEM), random.Random(0)
    for most in (1, 2, 3, 7, 29, 30, *dice.sample(range(4, 28), 4)):
        pieces = split_at_turns(messages, lambda part, most=most: len(part) <= 1 + 2 * most, share)
        assert [len(piece) // 2 for piece in pieces] == [most] * (30 // most) + [30 % most] * (30 % most > 0)
        (latest,) = latest_turns(messages, lambda part, most=most: len(part) <= 1 + 2 * most, share)
        assert latest == [SYSTEM, *messages[-2 * most :]]
