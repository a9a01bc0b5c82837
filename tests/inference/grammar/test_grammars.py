"""Grammars: masks against an independent count of what may follow, and grammars that are wrong or too much."""

import json
import re
import threading
import time
import tracemalloc

import numpy as np
import pytest

from headstart.inference.grammar import grammars as all_grammars, library, trial
from headstart.inference.grammar.grammars import Grammars
from headstart.inference.grammar.matcher import BROKEN, ENDED
from headstart.inference.grammar.prompt_lookup import MOST_INDEXED, PromptLookup
from headstart.inference.grammar.structured_outputs import MOST_CHARACTERS, StructuredOutputsParams
from headstart.inference.models.target_source import load_tokenizer
from headstart.tests.inference.server.serving import TARGET

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TARGET, None)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    found = Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    yield found
    found.close()


def matcher_of(grammars, most_drafts=0, **given):
    return grammars.matchers(grammars.check(StructuredOutputsParams(**given)), 1, most_drafts)[0]


def test_what_followed_earlier_is_drafted_as_far_as_the_grammar_allows(grammars, tokenizer):
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt, eos = "count_words_of_text count_words", tokenizer.eos_token_id
    grammar = grammars.check(StructuredOutputsParams(regex="(count_[a-z]+_of_tea ){1,9}stop"))
    (matcher,) = grammars.matchers(grammar, 1, 6, ids(prompt))
    for token in ids("count_words_of_tea count"):
        for draft, mask in zip(matcher.drafts, matcher.masks):
            assert draft in allowed(mask)
        assert matcher.masks.shape[0] == 1 + len(matcher.drafts)
        assert matcher.accept(token) is None
        matcher.look_ahead()
        if matcher._tokens == ids("count_"):  # the prompt went on with _text, which the grammar does not allow
            assert tokenizer.decode(matcher.drafts) == "words_of_"
    assert tokenizer.decode(matcher.drafts).startswith("_words")
    assert len(matcher.drafts) > 3
    # A token after which nothing may follow is not drafted.
    choice = grammars.check(StructuredOutputsParams(choice=["yes", "no"]))
    (matcher,) = grammars.matchers(choice, 1, 6, [*ids("no"), *ids("yes"), eos] * 2 + ids("no"))
    matcher.look_ahead()
    assert matcher.drafts == ids("yes")[:-1]


def test_many_small_forms_are_never_taken_for_large_ones(grammars):
    """Of some, less is taken than is freed meanwhile."""
    sizes = [grammars.check(StructuredOutputsParams(choice=[f"w{i}"])).num_bytes for i in range(40)]
    assert max(sizes) < 2**20


def test_the_longest_and_latest_match_is_copied():
    lookup = PromptLookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3])
    assert lookup.after([], 2) == [9, 2]  # after 1 2 3; after 2 3 alone came 8
    assert lookup.after([9], 3) == [2, 3, 8]
    assert lookup.after([7], 3) == []
    lookup.append(4)
    assert lookup.after([1, 2, 3], 1) == [4]
    further = lookup.followed_by([2, 3, 4, 1, 2])
    assert further.after([], 3) == [3, 4, 2]  # the prompt alone has 1 2 3
    assert further.after([3], 2) == [4, 2]
    assert lookup.after([2, 3], 1) == lookup.followed_by([]).after([2, 3], 1) == [4]
    assert PromptLookup([]).after([5], 3) == []
    assert len(PromptLookup(range(10**5))._tokens) == MOST_INDEXED


def test_outputs_that_wait_take_little_and_share_what_is_looked_up(grammars, tokenizer):
    """One prompt's index takes 461 KB, and 2 ms of the engine's loop."""
    prompt, (word,) = [*range(100, 2000)], tokenizer("a")["input_ids"]
    grammar = grammars.check(StructuredOutputsParams(regex="[a-d]+"))
    grammars.compile(grammar)
    tracemalloc.start()
    try:
        matchers = grammars.matchers(grammar, 32, 4, prompt)
        waiting = tracemalloc.get_traced_memory()[0]
        for matcher in matchers:
            matcher.accept(word)
            matcher.look_ahead()
        running = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert waiting < 32 * 10_000
    assert 200_000 < running < 500_000 + 32 * 40_000


def allowed(mask):
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def test_a_mask_holds_what_may_follow_and_nothing_else(grammars, tokenizer):
    """Of a list of words, every token that goes on with one of them; EOS where one is complete.

    Where all of them go on alike, the library leaves one way only to cut this into tokens.
    """
    words, eos = ["count", "counter", "count words", "def x", "déjà"], tokenizer.eos_token_id
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    for word in words:
        matcher, tokens, ended = matcher_of(grammars, choice=words), tokenizer(word)["input_ids"], None
        for i in range(len(tokens) + 1):
            text, here = tokenizer.decode(tokens[:i]), allowed(matcher.masks[0])
            assert (eos in here) == (text in words)
            if "\ufffd" not in text:  # half a character has no text to compare
                after = [w[len(text) :] for w in words if w.startswith(text)]
                expected = {t for t, more in enumerate(texts) if more and any(w.startswith(more) for w in after)}
                found = {t for t in here - {eos} if "\ufffd" not in texts[t]}
                forced = len(found) == 1 and all(w.startswith(texts[min(found)]) for w in after)
                assert found == expected - {eos} or (forced and found < expected)
            if i < len(tokens):
                ended = matcher.accept(tokens[i])
                matcher.look_ahead()
        assert (ended is ENDED) == (word != "count")


def test_looking_ahead_along_forced_tokens_changes_nothing(grammars, tokenizer):
    schema = {"type": "object", "properties": {"number": {"const": "one of many"}}, "required": ["number"]}
    given = dict(json=schema | {"additionalProperties": False}, disable_any_whitespace=True)
    ahead, plain = matcher_of(grammars, 8, **given), matcher_of(grammars, 0, **given)
    assert not ahead.drafts, "no step drafts before the first token"
    ahead.look_ahead()
    assert len(ahead.drafts) > 3
    text = tokenizer.decode(ahead.drafts)
    assert '{"number":"one of many"}'.startswith(text)
    masks = ahead.masks.copy()
    for token, mask in zip(ahead.drafts, masks):
        assert (plain.masks[0] == mask).all()
        assert token in allowed(mask)
        assert plain.accept(token) is None
        plain.look_ahead()
    assert (plain.masks[0] == masks[-1]).all()
    # After some of them, after none, and from the start again, the rest is as it was.
    ahead.accept(ahead.drafts[0])
    ahead.look_ahead()
    assert (ahead.masks[: len(masks) - 1] == masks[1:]).all()
    ahead.start_over([])
    assert (ahead.masks == masks[:1]).all()
    ahead.look_ahead()
    assert (ahead.masks == masks).all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json": '{"type": "strin"}'}, "Invalid type: strin"),
        ({"json": {"$ref": "#/$defs/x"}}, "does not exist"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "NoExtension"),
        ({"json": {"type": "object", "propertyNames": {"pattern": "a"}}}, "Unimplemented keys"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "a{0}"}, "only the empty text"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "root ::= (("}, "structured_outputs grammar cannot be followed"),
        ({"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000}, "deeply nested"),
        ({"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(200)) + 'a200: "x"'}, "many items"),
        ({"json": {"allOf": [{"oneOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(12)]}}, "too large"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_grammar_that_cannot_be_followed_is_refused_in_one_line(grammars, given, words):
    params = StructuredOutputsParams(**given)
    for _ in range(2):  # the second answer is remembered
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            grammars.check(params)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


def test_what_kills_the_trial_is_refused_and_harms_nobody(grammars, monkeypatch):
    """Time, memory and stack: of many numbers' multiples, and of a long chain of terminals."""
    chain = "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(12000)) + 'A12000: "x"'
    assert len(chain) < MOST_CHARACTERS
    for given in ({"json": {"type": "integer", "multipleOf": 1000003}}, {"grammar": chain}):
        with pytest.raises(
            ValueError, match="takes more than 2 seconds, or too much memory, or it is nested too deeply"
        ):
            grammars.check(StructuredOutputsParams(**given))
        assert matcher_of(grammars, regex="[a-c]+").masks.any()


def test_closing_waits_for_no_grammar_that_is_tried(grammars, monkeypatch):
    """The pipe of a process that is killed must not be closed while another thread is about to wait for it."""
    grammars.check(StructuredOutputsParams(regex="[a-g]+"))
    begun, found = threading.Event(), []

    class Late(trial.selectors.DefaultSelector):
        def select(self, timeout):
            begun.set()
            time.sleep(0.3)
            return super().select(timeout)

    def check():
        with pytest.raises(ValueError, match="takes more than"):
            grammars.check(StructuredOutputsParams(json={"type": "integer", "multipleOf": 1000003, "maximum": 1}))
        found.append(time.monotonic())

    monkeypatch.setattr(trial.selectors, "DefaultSelector", Late)
    monkeypatch.setattr(trial, "SECONDS", 5)
    thread, start = threading.Thread(target=check), time.monotonic()
    thread.start()
    assert begun.wait(5)
    grammars.close()
    thread.join()
    assert found[0] - start < 2


def test_the_trial_leaves_no_core_and_keeps_limits_of_the_user(grammars):
    import resource

    before = resource.getrlimit(resource.RLIMIT_CPU)
    matcher_of(grammars, regex="[a-e]+")
    pid = grammars._trial._process.pid
    assert resource.prlimit(pid, resource.RLIMIT_CORE)[0] == 0
    resource.prlimit(pid, resource.RLIMIT_CPU, (10**6, 10**6))
    assert matcher_of(grammars, regex="[a-f]+").masks.any()
    assert resource.prlimit(pid, resource.RLIMIT_CPU)[1] == 10**6
    assert resource.getrlimit(resource.RLIMIT_CPU) == before


def test_compiled_grammars_leave_by_the_bytes_that_they_take(grammars, monkeypatch):
    forms = [{"json": {"type": "integer", "multipleOf": 40009}}, *({"regex": f"[a-c]{{{i}}}"} for i in range(2, 6))]
    large, *small = [grammars.check(StructuredOutputsParams(**form)) for form in forms]
    assert max(grammar.num_bytes for grammar in small) < 2**20 < 4 * 2**20 < large.num_bytes
    kept = [grammars.compile(grammar).matcher for grammar in (large, *small[:3])]
    monkeypatch.setattr(all_grammars, "MOST_BYTES", large.num_bytes + 4 * library.GROWTH + 2**20)
    # Lately used: the next to leave are the large one and the second.
    assert grammars.compile(small[0]).matcher is kept[1]
    grammars.compile(small[3])
    assert [grammar.text in grammars._compiled for grammar in (large, *small)] == [False, True, True, True, True]
    grammars.compile(large)
    assert [grammar.text in grammars._compiled for grammar in (large, *small)] == [True, True, False, True, True]
    assert grammars.compile(small[2]).matcher is kept[3]


def test_grammars_in_use_count_and_are_compiled_once(grammars, monkeypatch):
    """What is kept leaves for them, even if used earlier."""
    params = [StructuredOutputsParams(regex=f"[a-c]{{{i}}}x") for i in range(2, 7)]
    first, second, *others = [grammars.check(one) for one in params]
    monkeypatch.setattr(all_grammars, "MOST_BYTES", 3 * library.GROWTH + 2**20)
    compiled = []

    def noted(tokenizer, text, work=library.compile_grammar, **given):
        compiled.append(text)
        return work(tokenizer, text, **given)

    monkeypatch.setattr(all_grammars, "compile_grammar", noted)
    used = [grammars.matchers(grammar, 1, 4) for grammar in (first, second)]
    for grammar in (*others, *others):
        grammars.compile(grammar)
        assert len(grammars._alive) <= 3
        assert sum(one.most_bytes for one in grammars._alive.values()) <= all_grammars.MOST_BYTES
    assert first.text not in grammars._compiled
    used += [grammars.matchers(grammar, 1, 4) for grammar in (second, first)]
    assert compiled.count(first.text) == compiled.count(second.text) == 1
    assert all_grammars.fit({first, second, others[0], first})
    assert not all_grammars.fit({first, second, *others})
    used.clear()
    for grammar in others:
        grammars.compile(grammar)
    assert set(grammars._alive) == {grammar.text for grammar in others}


def test_the_bytes_of_a_grammar_are_measured_whatever_was_tried_before(grammars):
    """Memory that an earlier one has left is taken again, so the process does not grow."""
    sizes = []
    for number, title in ((40009, "a"), (40009, "b"), (4001, "c"), (40009, "d")):
        form = {"type": "integer", "multipleOf": number, "title": title}
        sizes.append(grammars.check(StructuredOutputsParams(json=form)).num_bytes / 2**20)
    small = sizes.pop(2)
    assert 0 < small < 3
    assert min(sizes) > 8
    assert max(sizes) < 1.1 * min(sizes)


def test_a_grammar_that_takes_too_much_memory_is_refused(grammars, monkeypatch):
    monkeypatch.setattr(all_grammars, "MOST_BYTES_OF_ONE", 2**21)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"structured_outputs json takes \d+ MiB of memory once compiled; at most 2"
        ):
            grammars.check(StructuredOutputsParams(json={"type": "integer", "multipleOf": 40037}))


def test_any_thread_may_check(grammars):
    found = [None] * 8

    def check(i):
        found[i] = grammars.check(StructuredOutputsParams(choice=[f"word {i % 4}"]))

    threads = [threading.Thread(target=check, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, grammar in enumerate(found):
        assert f"word {i % 4}" in grammar.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json_object": False}, "got none"),
        ({"regex": ""}, "structured_outputs regex must be a string"),
        ({"regex": 3}, "structured_outputs regex must be a string"),
        ({"choice": []}, "structured_outputs choice must be a list"),
        ({"choice": ["a", ""]}, "structured_outputs choice must be a list"),
        ({"choice": "ab"}, "structured_outputs choice must be a list"),
        ({"json": "{"}, "is no JSON"),
        ({"json": "[]"}, "must be a JSON schema"),
        ({"json": {"a": {1}}}, "must be a JSON schema"),
        ({"json": '{"a":' * 50000}, "is no JSON"),
        ({"json_object": "yes"}, "must be True or False"),
        ({"regex": "a" * 300000}, "has 300000 characters; at most 262144"),
        ({"json_object": True, "whitespace_pattern": "a" * 300000}, "has 300000 characters; at most 262144"),
        ({"regexp": "a"}, "did you mean 'regex'"),
        ({"structural_tag": "a"}, "write a grammar"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_parameters_are_refused(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        StructuredOutputsParams(**given)


def test_what_one_output_makes_of_the_lexer_ends_no_other(grammars, tokenizer, monkeypatch):
    """Outputs share a lexer, which is broken for all of them once one has filled it."""
    form = {"regex": "[ -~]*a[ -~]{14}b[ -~]*c[ -~]{12}d"}
    tokens = tokenizer("abacab, cab back at a crab: cabbage, abacus and arcade " * 40)["input_ids"]
    whole = matcher_of(grammars, **form)
    for name in ("SHARED_STATES", "STATES_ALONE"):
        monkeypatch.setattr(library, name, 2000)
    grammars._compiled.clear()
    grammars._alive.clear()
    shared = grammars.compile(grammars.check(StructuredOutputsParams(**form)))
    filler, other = matcher_of(grammars, **form), matcher_of(grammars, **form)
    for token in tokens:
        if (ended := filler.accept(token) or filler.look_ahead()) is not None:
            break
    assert ended is BROKEN, "it has filled the shared lexer, and then its own"
    assert "too many states" in filler.error
    assert grammars.compile(grammars.check(StructuredOutputsParams(**form))) is not shared
    later = matcher_of(grammars, **form)
    for token in tokens[:20]:
        for matcher in (whole, other, later):
            assert matcher.accept(token) is None
            assert matcher.look_ahead() is None
            assert (matcher.masks == whole.masks).all()


def test_starting_over_mends_what_is_broken(grammars, tokenizer):
    matcher, (word,) = matcher_of(grammars, regex="[ab]+"), tokenizer("a")["input_ids"]
    masks = matcher.masks.copy()
    assert matcher.accept(tokenizer("!")["input_ids"][0]) is BROKEN
    assert matcher.start_over([word]) is None
    assert matcher.accept(word) is None
    assert matcher.start_over([]) is None
    assert (matcher.masks == masks).all()


def test_a_schema_keeps_its_order_and_is_text():
    schema = {"properties": {"b": {}, "a": {}}, "type": "object"}
    params = StructuredOutputsParams(json=schema)
    assert params.json == json.dumps(schema)
    assert params == StructuredOutputsParams(json=json.dumps(schema))
    assert hash(params)


def test_without_the_library_the_error_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match="pip install 'headstart\\[serve\\]'"):
        Grammars(tokenizer, len(tokenizer), {2}).check(StructuredOutputsParams(regex="a"))
