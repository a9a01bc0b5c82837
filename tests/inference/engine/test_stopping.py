"""An output ends where plain decoding ends it, wherever in an accepted block that is: stop tokens, EOS, stop strings, max_tokens.

The drafter always knows the next token: on the chain a step emits six tokens, on the tree up to six. A token is one character.
"""

import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from headstart import LLM, SamplingParams
from headstart.inference.engine.engine import Engine
from headstart.inference.engine.stopping import StopChecker, find_stop, stable_length
from headstart.inference.speculation.tree import Tree, chain
from headstart.tests.inference.engine.small_tokenizers import (
    byte_level_tokenizer,
    cleaning_tokenizer,
    llama2_tokenizer,
    wordpiece_tokenizer,
)

DEPTH = 5
BLOCK = DEPTH + 1
# Index 0 comes from the prompt; the blocks are 1-6, 7-12: a stop at any place up to 12 meets every depth twice.
PLACES = range(2 * BLOCK + 1)
CHARACTERS = [chr(33 + i) for i in range(94)] + ["é", "ß", "€"]
PROMPT = [51, 60, 31, 8, 77]
# Two children below every other node: the accepted path lies at other places than 0, 1, 2 ...
SPARSE = Tree((-1, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8), (0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1))


@pytest.fixture(scope="module")
def tokenizer():
    letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(CHARACTERS)}, merges=[]))
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters)


@pytest.fixture(scope="module")
def plain(random_target, tokenizer):
    return LLM(random_target, tokenizer=tokenizer, max_num_seqs=1)


SAMPLED = dict(seed=0, temperature=3.0, logprobs=1)
LENGTH = 3 * BLOCK


@pytest.fixture(scope="module")
def free(plain):
    """The output without any stop."""
    (output,) = plain.generate([PROMPT], SamplingParams(**SAMPLED, max_tokens=LENGTH))
    tokens = output.outputs[0].token_ids
    assert len(set(tokens[: len(PLACES) + 1])) == len(PLACES) + 1, "every token must stop at one place only"
    return output.outputs[0]


@pytest.fixture(scope="module", params=["chain", "tree"])
def fast(request, random_target, tokenizer, free, speculate):
    """Speculation that accepts whole blocks."""
    tree = chain(DEPTH) if request.param == "chain" else SPARSE
    options = dict(tokenizer=tokenizer, max_num_seqs=1)
    llm = speculate(random_target, tree, [free.token_ids], [PROMPT], 1.0, options)
    (output,) = llm.generate([PROMPT], SamplingParams(**SAMPLED, max_tokens=LENGTH))
    assert ends(output) == ends_of(free)
    return llm


def ends_of(output):
    """The fields that tell where and why an output ended."""
    return (
        output.token_ids,
        output.text,
        output.logprobs,
        output.cumulative_logprob,
        output.finish_reason,
        output.stop_reason,
    )


def ends(output):
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
    return ends_of(output.outputs[0])


def answer(llm, **params):
    return ends(llm.generate([PROMPT], SamplingParams(**SAMPLED | dict(max_tokens=LENGTH) | params))[0])


def test_a_stop_string_costs_no_decoding_of_the_whole_text_for_every_token(plain, monkeypatch):
    decode, lengths = plain.tokenizer.decode, []

    def watch(token_ids, **options):
        lengths.append(len(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(plain.tokenizer, "decode", watch)
    params = SamplingParams(temperature=3.0, seed=0, max_tokens=200, stop=["never said", "nor this"])
    plain.generate([PROMPT], params)
    assert len(lengths) > 190
    assert sorted(lengths)[-3] < 40


def test_stop_strings_are_found_however_their_characters_are_cut_into_tokens(plain):
    """Many tokens of less than a character, after special tokens and a long token; compared with a search in the whole text."""
    pieces = [bytes([b]) for b in "é€😀x".encode()] + [b"x" * 40]

    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return b"".join(pieces[i] for i in ids if i >= 0).decode(errors="replace")

    rng = random.Random(0)
    for stop in ("😀" * 20, "é€😀x", "xx€", "x"):
        for _ in range(40):
            whole = list(range(len(pieces) - 1))
            ids = [
                i
                for _ in range(rng.randrange(12))
                for i in rng.choice([whole, [-1], [len(pieces) - 1], [9], whole[5:9]])
            ]
            ids += [i for _ in range(20) for i in whole[5:9]] if rng.random() < 0.5 else []
            checker = StopChecker(Bytes(), set(), SamplingParams(stop=[stop], max_tokens=None))
            request = SimpleNamespace(output_token_ids=[])
            for token in ids:
                request.output_token_ids.append(token)
                found = checker(request)
                text = Bytes().decode(request.output_token_ids, True)
                assert (found is not None) == (stop in text)
                if found:
                    break


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *given, **named):
        return super()._decode(*given, **named).upper()


class Dashes(PreTrainedTokenizerFast):
    @staticmethod
    def clean_up_tokenization(text):
        return text.replace(" - ", "-")


def dashing_tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("x", "-", "<unk>"))}, unk_token="<unk>"))
    return Dashes(tokenizer_object=backend, clean_up_tokenization_spaces=True)


def shouting_tokenizer():
    return Shouting(tokenizer_object=byte_level_tokenizer().backend_tokenizer)


@pytest.mark.parametrize(
    "make",
    [
        byte_level_tokenizer,
        cleaning_tokenizer,
        llama2_tokenizer,
        wordpiece_tokenizer,
        shouting_tokenizer,
        dashing_tokenizer,
    ],
)
@pytest.mark.parametrize("skips", [True, False])
def test_text_is_the_tokenizers_own(make, skips):
    tokenizer, dice = make(), random.Random(1)
    checker = StopChecker(tokenizer, set(), SamplingParams(skip_special_tokens=skips))
    for _ in range(300):
        ids = [dice.randrange(len(tokenizer)) for _ in range(dice.randrange(1, 20))]
        assert checker.decode(ids) == tokenizer.decode(ids, skip_special_tokens=skips)
    assert (checker._decode == tokenizer.backend_tokenizer.decode) == (make in (byte_level_tokenizer, llama2_tokenizer))


def test_text_of_a_tokenizer_whose_decode_was_replaced(plain, monkeypatch):
    monkeypatch.setattr(plain.tokenizer, "decode", lambda ids, **options: f"{len(ids)} ids")
    assert StopChecker(plain.tokenizer, set(), SamplingParams()).decode([5, 6]) == "2 ids"


@pytest.mark.parametrize("stop", ["\n", "\n\n", "។", "x"])
def test_stop_strings_are_found_behind_runs_of_byte_tokens(stop):
    tokenizer = llama2_tokenizer()
    for count in (*range(1, 14), 40):
        checker = StopChecker(tokenizer, set(), SamplingParams(stop=[stop], max_tokens=None))
        request = SimpleNamespace(output_token_ids=[])
        for token in [*("ខ" * count + "។\n\n").encode(), 256]:
            request.output_token_ids.append(token)
            found = checker(request)
            assert (found is not None) == (stop in tokenizer.decode(request.output_token_ids))
            if found:
                break
        assert found == stop


def test_blocks_are_accepted_whole(fast):
    if fast.engine.tree.tree.is_chain:
        before = fast.get_stats()
        answer(fast)
        steps = fast.get_stats()["num_spec_steps"] - before["num_spec_steps"]
        assert steps == 3, "17 tokens after the first one, six per step"
    accepted = fast.get_stats()["acceptance_per_position"]
    assert len(accepted) == DEPTH
    assert all(accepted), "every depth must have been accepted"


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_token_ends_the_output_at_any_depth(plain, fast, free, place):
    token = free.token_ids[place]
    expected = answer(plain, stop_token_ids=[token])
    assert expected[0] == free.token_ids[: place + 1]
    assert expected[1] == free.text[:place], "the stop token is no part of the text"
    assert expected[2] == free.logprobs[: place + 1]
    assert expected[-2:] == ("stop", token)
    assert answer(fast, stop_token_ids=[token]) == expected


def test_a_stop_token_is_in_the_text_if_asked_for(plain, fast, free):
    kept = dict(stop_token_ids=[free.token_ids[4]], include_stop_str_in_output=True)
    assert answer(plain, **kept)[1] == free.text[:5]
    assert answer(fast, **kept) == answer(plain, **kept)


@pytest.mark.parametrize("place", PLACES)
def test_eos_ends_the_output_at_any_depth(plain, fast, free, place, monkeypatch):
    for llm in (plain, fast):
        monkeypatch.setattr(llm.engine, "eos_token_ids", {free.token_ids[place]})
    expected = answer(plain)
    assert expected[0] == free.token_ids[: place + 1]
    assert expected[-2:] == ("stop", None)
    assert answer(fast) == expected
    if place == BLOCK:
        assert answer(fast, ignore_eos=True)[0] == free.token_ids


@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("kept", [False, True])
def test_a_stop_string_ends_the_output_within_and_across_blocks(plain, fast, free, length, kept):
    for place in PLACES:
        stop = free.text[place : place + length]
        assert free.text.count(stop) == 1
        params = dict(stop=["never", stop], include_stop_str_in_output=kept)
        expected = answer(plain, **params)
        assert expected[0] == free.token_ids[: place + length]
        assert expected[1] == free.text[: place + length * kept]
        assert expected[2] == free.logprobs[: place + length]
        assert expected[-2:] == ("stop", stop)
        assert answer(fast, **params) == expected


def test_max_tokens_end_the_output_at_any_depth(plain, fast, free):
    for place in PLACES:
        expected = answer(plain, max_tokens=place + 1)
        assert expected[:3] == (free.token_ids[: place + 1], free.text[: place + 1], free.logprobs[: place + 1])
        assert expected[-2:] == ("length", None)
        assert answer(fast, max_tokens=place + 1) == expected
    # The last token that fits is a stop token as well.
    both = dict(max_tokens=4, stop_token_ids=[free.token_ids[3]])
    assert answer(plain, **both)[-2:] == ("stop", free.token_ids[3])
    assert answer(fast, **both) == answer(plain, **both)


def test_stop_strings_do_not_count_before_min_tokens(plain, fast, free):
    early, across = free.text[2:4], free.text[5:8]
    params = dict(stop=[early, across], min_tokens=7)
    expected = answer(plain, **params)
    assert expected[0] == free.token_ids[:8]
    assert expected[1] == free.text[:5], "cut before the string that ended it, not before the early one"
    assert expected[-2:] == ("stop", across)
    assert answer(fast, **params) == expected


@pytest.mark.parametrize("kept", [False, True])
def test_streams_end_where_outputs_end(plain, fast, free, kept):
    for place in (3, 6):
        params = SamplingParams(
            **SAMPLED, max_tokens=LENGTH, stop=free.text[place : place + 3], include_stop_str_in_output=kept
        )
        expected = ends(plain.generate([PROMPT], params)[0])
        for llm in (plain, fast):
            pieces, stream = [], llm.stream(PROMPT, params)
            while True:
                try:
                    pieces.append(next(stream))
                except StopIteration as end:
                    output = end.value
                    break
            assert ends(output) == expected
            assert "".join(pieces) == expected[1]


def test_ends_differ_if_only_the_last_token_of_a_block_is_checked(plain, fast, free, monkeypatch):
    hand_back = Engine._hand_back

    def unchecked(self, request, tokens, logprobs):
        checker, request.stop_checker = request.stop_checker, lambda request: None
        for token in tokens[:-1]:
            request.append(token)
        request.stop_checker = checker
        return hand_back(self, request, tokens[-1:], logprobs)

    def tokens(llm):
        params = SAMPLED | dict(logprobs=None, max_tokens=LENGTH)
        stopped = [SamplingParams(**params, stop_token_ids=[free.token_ids[place]]) for place in range(1, BLOCK)]
        return [output.outputs[0].token_ids for output in llm.generate([PROMPT] * DEPTH, stopped)]

    expected = tokens(plain)
    assert tokens(fast) == expected
    monkeypatch.setattr(Engine, "_hand_back", unchecked)
    assert tokens(fast) != expected


def test_stop_strings_are_found_first_come_and_behind_the_start():
    assert find_stop("abcabc", ("ca", "bc")) == (1, "bc")
    assert find_stop("abcabc", ("x",)) is None
    assert find_stop("abcabc", ("bc",), 3) == (4, "bc")
    assert find_stop("abcabc", ("bc",), 2) == (1, "bc"), "it ends after the start"
    assert find_stop("abcabc", ("abc", "a"), 6) is None
    assert find_stop("", ("abc",), 1) is None


def test_text_that_may_become_a_stop_string_is_held_back():
    assert stable_length("hello", ("lox", "zz")) == 3
    assert stable_length("hel\ufffd", ("x",)) == 3
    assert stable_length("hello", ()) == 5
