"""The pieces of a stream join to the output's text, whatever the tokens: bytes that are no character, spaces, special tokens."""

import random
from types import SimpleNamespace

import pytest

from headstart import SamplingParams
from headstart.inference.engine.stopping import MARGIN, GrowingText, StopChecker, stable_length
from headstart.inference.line import Call
from headstart.inference.session import CheckedPrompt, Session
from headstart.tests.inference.engine.small_tokenizers import (
    byte_level_tokenizer,
    cleaning_tokenizer,
    llama2_tokenizer,
    wordpiece_tokenizer,
)

BYTES = (llama2_tokenizer, byte_level_tokenizer)
TOKENIZERS = (*BYTES, cleaning_tokenizer, wordpiece_tokenizer)


FREE = SamplingParams(max_tokens=None)


def checker_of(tokenizer, params=FREE):
    return StopChecker(tokenizer, {len(tokenizer)}, params)


def stream(tokenizer, token_ids, params=None, block=lambda: 1):
    """(pieces, text of the output) of a request that is given these tokens, `block()` per step."""
    requests, left = [], iter(token_ids)

    def step():
        for _ in range(block()):
            if requests[0].append(next(left)):
                break
        return requests

    decoder = SimpleNamespace(vocab_size=len(tokenizer))
    engine = SimpleNamespace(decoder=decoder, eos_token_ids={len(tokenizer)}, add=requests.append, step=step)
    session, call = Session(engine, tokenizer, 1 + len(token_ids)), Call(is_stream=True)
    submission = session.submit(CheckedPrompt(None, [1], params or FREE, ()), call=call)
    pieces = list(session.subscribe(submission, call))
    return pieces, session.output(submission).outputs[0].text


def tokens_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("before", ["", "\n", "\n\n", "ខ", "x\n", " \n", "x 😀"])
@pytest.mark.parametrize("make", BYTES)
def test_a_cut_character_after_whole_ones(make, before, cut):
    """max_tokens ends within an emoji: Llama 2 then shows none of the bytes before it."""
    tokenizer = make()
    ids = tokens_of(tokenizer, before) + tokens_of(tokenizer, "😀")[:cut]
    pieces, text = stream(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert text.endswith("\ufffd")


def test_spaces_that_go_with_later_marks_are_not_shown():
    tokenizer = cleaning_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["▁x", "▁n", "▁'", "▁", "t", "▁x", "▁."])
    pieces, text = stream(tokenizer, ids)
    assert "".join(pieces) == text == "xn't x."


@pytest.mark.parametrize("make", TOKENIZERS)
def test_the_pieces_join_to_the_text_of_any_tokens(make):
    tokenizer, rng = make(), random.Random(0)
    words = ["😀", "é", "x", " ", "\n", "ខ", " he", "x x", " ", "."]
    kinds = [tokens_of(tokenizer, word) for word in words] if make in BYTES else [[i] for i in range(len(tokenizer))]
    for number in range(3000):
        chosen = rng.sample(kinds, min(len(kinds), rng.randrange(2, 7)))
        ids = []
        for _ in range(rng.randrange(1, 40)):
            word = rng.choice(chosen)
            which = rng.random()
            if which < 0.15:
                word = word[: rng.randrange(len(word) + 1)]  # a part of a character
            elif which < 0.2:
                word = [rng.randrange(len(tokenizer))]
            elif which < 0.25:
                word = [tokenizer.bos_token_id]
            ids += word
        if not ids:
            continue
        own = {}
        if number % 3 == 1:
            own = dict(stop=rng.sample(["x", "\n", "ខx", "\ufffd", "\ufffdx", " ", "x x", "é\n"], 2))
        elif number % 3 == 2:
            own = dict(stop_token_ids=[rng.choice(ids)])
        kept = dict(min_tokens=rng.randrange(4), include_stop_str_in_output=rng.random() < 0.5)
        params = SamplingParams(max_tokens=None, **own, **kept)
        pieces, text = stream(tokenizer, ids, params, lambda: rng.randrange(1, 6))
        assert "".join(pieces) == text, (ids, own)
        assert "" not in pieces


@pytest.mark.parametrize("make", BYTES)
def test_the_text_of_a_stream_is_that_of_all_its_tokens(make):
    """Characters of one to four tokens, half ones, spaces and special tokens; only an end that may change is held back."""
    tokenizer, rng = make(), random.Random(0)
    checker = checker_of(tokenizer)
    decode, space = checker.decode, tokenizer.convert_tokens_to_ids("▁")
    changing = {tokenizer.bos_token_id, *([*range(256), space] if make is llama2_tokenizer else [])}
    words = ["😀", "é", "x", " ", "\n", "ខ", "ខ" * 20, "x" * 30, " he"]
    words = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words] + [[tokenizer.bos_token_id] * 20]
    half = words[0][:2]
    for _ in range(25):
        kinds = rng.sample([*words, half], rng.randrange(1, 5))
        ids = [token for _ in range(60) for token in rng.choice(kinds)]
        growing, place, said = GrowingText(checker), 0, ""
        while place < len(ids):
            place += rng.randrange(1, 6)
            text, known = growing.of(ids[:place]), ids[:place]
            while known and known[-1] in changing:
                known.pop()
            assert text == decode(known)
            said += text[len(said) : stable_length(text, ())]
            assert decode(ids).startswith(said)


def test_a_stream_goes_on_after_bytes_that_are_no_character():
    """Llama 2 decodes a run of bytes as a whole: if the run becomes invalid, its valid beginning is gone, too."""
    tokenizer = llama2_tokenizer()
    x, run = tokenizer.convert_tokens_to_ids("x"), list("ខខខខខខ".encode())
    growing, ids = GrowingText(checker_of(tokenizer)), []
    for token in [*[x] * 40, *run, 0xF0, *[x] * 40]:
        ids.append(token)
        text = growing.of(ids)
    assert text == tokenizer.decode(ids) == "x" * 40 + "\ufffd" * 19 + "x" * 40


def test_a_stream_costs_no_decoding_of_all_tokens_for_every_piece(monkeypatch):
    for make, text in [(m, t) for m in BYTES for t in ("xé 😀 he" * 200 + "x", "ខ" * 500 + "x")]:
        tokenizer, lengths = make(), []
        ids, checker = tokens_of(tokenizer, text), checker_of(tokenizer)
        decode = checker.decode
        monkeypatch.setattr(checker, "decode", lambda ids, decode=decode, n=lengths: n.append(len(ids)) or decode(ids))
        growing = GrowingText(checker)
        for place in range(1, len(ids) + 1):
            found = growing.of(ids[:place])
        assert found == text
        assert sum(lengths) < 4 * MARGIN * len(ids)
        assert sorted(lengths)[-3] < 4 * MARGIN, "but for a long run of bytes, which is decoded once"


@pytest.mark.parametrize("make", BYTES)
def test_a_stream_holds_nothing_back_that_is_final(make):
    """Text is shown as soon as a token follows that is no byte; bytes of a byte-level tokenizer, once their character is whole."""
    tokenizer = make()
    text, ids = "xé\n😀x he\nx", None
    if make is llama2_tokenizer:
        ids = tokenizer.convert_tokens_to_ids(
            ["x", "é", *(f"<0x{b:02X}>" for b in "\n😀".encode()), "x", "▁he", "<0x0A>", "x"]
        )
    pieces, found = stream(tokenizer, ids or tokens_of(tokenizer, text))
    assert found == text
    assert pieces == (["x", "é", "\n😀x", " he", "\nx"] if ids else list(text))
