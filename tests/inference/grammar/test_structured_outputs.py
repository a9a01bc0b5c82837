"""Structured outputs in the engine: they have their form, and the bits of plain decoding alone, whoever drafts or runs beside."""

import json
import re
from contextlib import suppress

import pytest

from headstart import LLM, SamplingParams, StructuredOutputsParams
from headstart.inference.engine.engine import Engine
from headstart.inference.engine.stopping import GrowingText
from headstart.inference.grammar.matcher import BROKEN, Matcher
from headstart.inference.grammar.prompt_lookup import PromptLookup
from headstart.inference.metrics import Counter
from headstart.inference.server.figures import speculation_metrics
from headstart.inference.speculation.tree import Tree, save_tree
from headstart.tests.inference.server.serving import HEADS, PROMPTS, TARGET

pytest.importorskip("llguidance")

FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "lines": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["read", "write", "count"]}, "minItems": 1, "maxItems": 3},
        "doc": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "lines", "tags"],
    "additionalProperties": False,
}
SIGNATURE = 'start: "def " NAME "(" NAME ("," NAME)* "):"\nNAME: /[a-z_]{1,8}/'
FORMS = {
    "free": None,
    "json": {"json": FUNCTION},
    "compact": {"json": FUNCTION, "disable_any_whitespace": True},
    "regex": {"regex": r"[a-z]{3,8}\(\d+\) -> (int|str|list)"},
    "choice": {"choice": ["alpha", "alphabet", "a quite long sentence", "déjà vu"]},
    "grammar": {"grammar": SIGNATURE},
    "object": {"json_object": True},
}
PAIRS = StructuredOutputsParams(regex="(!#|[$]%){20}")
NUM_TOKENS = 40


def params_of(form, **given):
    form = None if form is None else StructuredOutputsParams(**form)
    return SamplingParams(**dict(temperature=1.0, max_tokens=NUM_TOKENS, structured_outputs=form) | given)


def is_function(found):
    """Whether this is an instance of FUNCTION."""
    return (
        {"name", "lines", "tags"} <= set(found) <= set(FUNCTION["properties"])
        and isinstance(found["name"], str)
        and len(found["name"]) <= 12
        and type(found["lines"]) is int
        and 0 <= found["lines"] <= 999
        and 1 <= len(found["tags"]) <= 3
        and set(found["tags"]) <= {"read", "write", "count"}
        and found.get("doc") in (None, True, False)
    )


def has_form(name, text):
    if name in ("json", "compact"):
        without_strings = re.sub(r'"([^"\\]|\\.)*"', "", text)
        return is_function(json.loads(text)) and (name == "json" or " " not in without_strings)
    if name == "object":
        return isinstance(json.loads(text), dict)
    if name == "choice":
        return text in FORMS["choice"]["choice"]
    pattern = FORMS["regex"]["regex"] if name == "regex" else r"def [a-z_]{1,8}\([a-z_]{1,8}(,[a-z_]{1,8})*\):"
    return re.fullmatch(pattern, text) is not None


def make(**options):
    return LLM(str(TARGET), **dict(dtype="float32", device="cpu", max_num_seqs=8) | options)


def outputs_of(llm, prompts, params):
    return [found.outputs[0] for found in llm.generate(prompts, params)]


NAMES = [*FORMS, "free", "compact"]
WANTED = [params_of(FORMS[name], seed=i, temperature=0.7 + 0.3 * (i % 2)) for i, name in enumerate(NAMES)]
# Some 50 tokens each: outputs soon need a second page.
ASKED = ["import os, re\n" * 8 + PROMPTS[i % len(PROMPTS)] for i in range(len(NAMES))]


@pytest.fixture(scope="module")
def plain():
    return make()


@pytest.fixture(scope="module")
def expected(plain):
    """Tokens and reasons of WANTED, each request alone and without speculation."""
    found = [outputs_of(plain, prompt, params)[0] for prompt, params in zip(ASKED, WANTED)]
    return [(output.token_ids, output.finish_reason) for output in found]


CHAIN = {"model": str(HEADS)}
TREE = {"model": str(HEADS), "tree": "static"}
GROWING = {
    "model": str(TARGET),
    "method": "draft_model",
    "tree": {"dynamic": {"max_depth": 2, "width": 2, "num_nodes": 5}},
}


@pytest.mark.parametrize(
    ("speculation", "late", "options"),
    [
        (None, 1, {}),
        (CHAIN, 0, {}),
        (TREE, 1, {}),
        (CHAIN | {"adaptive": True}, 1, {}),
        (GROWING, 0, {}),
        (TREE, 1, {"num_gpu_blocks_override": 6}),
    ],
    ids=["together", "chain", "tree", "adaptive", "growing tree", "preempted"],
)
def test_neither_drafts_nor_neighbours_change_a_token(expected, speculation, late, options, tmp_path):
    if speculation is GROWING:
        (tmp_path / "tree.json").write_text(json.dumps(GROWING["tree"]))
        speculation = GROWING | {"tree": str(tmp_path / "tree.json")}
    llm = make(speculative_config=speculation, **options)
    llm.engine.steps_late = late
    for first in (0, 2) if speculation is TREE else (0,):  # once more: from the cache, in other seats
        found = outputs_of(llm, ASKED[first:], WANTED[first:])
        assert [(output.token_ids, output.finish_reason) for output in found] == expected[first:]
    llm.engine.check()
    assert (llm.get_stats()["num_preemptions"] > 0) == ("num_gpu_blocks_override" in options)
    if speculation in (CHAIN, TREE):
        compact = found[NAMES.index("compact") - first].spec_decode_metrics
        assert 5 < compact.num_accepted_tokens <= compact.num_draft_tokens < compact.num_accepted_tokens + 5
        told = speculation_metrics(compact, llm.tree)
        assert told["num_draft_tokens"] == told["num_draft_nodes"] == compact.num_draft_tokens, (
            "a chain, on a tree, too"
        )
        counted = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
        depths, nodes = counted["vllm:spec_decode_num_draft_tokens"], counted["headstart:spec_decode_num_draft_nodes"]
        assert (depths < nodes) == (speculation is TREE)
        assert depths < llm.tree.max_depth * counted["vllm:spec_decode_num_drafts"]


def test_every_output_has_its_form(plain):
    params = [params_of(form, n=2, seed=5, max_tokens=100) for name, form in FORMS.items() if form]
    ended, others = 0, set()
    for name, found in zip([name for name, form in FORMS.items() if form], plain.generate([PROMPTS[0]] * 6, params)):
        for output in found.outputs:
            assert output.finish_reason in ("stop", "length")
            if output.finish_reason == "stop":
                ended += 1
                assert output.stop_reason is None
                assert has_form(name, output.text), (name, output.text)
        others.add(len({tuple(output.token_ids) for output in found.outputs}))
    assert ended >= 7
    assert max(others) == 2


def test_the_first_end_counts_whatever_it_is(plain):
    whole = outputs_of(plain, PROMPTS[0], params_of(FORMS["compact"], seed=1))[0]
    assert whole.finish_reason == "stop"
    cut = outputs_of(plain, PROMPTS[0], params_of(FORMS["compact"], seed=1, max_tokens=7))[0]
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:7], "length")
    exact = outputs_of(plain, PROMPTS[0], params_of(FORMS["compact"], seed=1, max_tokens=len(whole.token_ids)))[0]
    assert (exact.token_ids, exact.finish_reason) == (whole.token_ids, "stop")
    stopped = outputs_of(plain, PROMPTS[0], params_of(FORMS["compact"], seed=1, stop=['"lines"']))[0]
    assert (stopped.text, stopped.stop_reason) == (whole.text[: whole.text.index('"lines"')], '"lines"')
    # EOS may come where the form is complete; min_tokens forbids it, and cannot make the output longer than its form.
    eos = plain.tokenizer.eos_token_id
    letters, word = {"regex": "[ab]+"}, {"choice": ["alphabet"]}
    given = [{}, {"ignore_eos": True}, {"min_tokens": 12}]
    params = [params_of(letters, logit_bias={eos: 100}, **more) for more in given] + [params_of(word, min_tokens=12)]
    found = outputs_of(plain, [PROMPTS[0]] * 4, params)
    assert [output.finish_reason for output in found] == ["stop"] * 4
    assert [len(output.token_ids) for output in found[:3]] == [2, 2, 13]
    assert all(output.token_ids.index(eos) == len(output.token_ids) - 1 for output in found[:3])
    assert all(re.fullmatch("[ab]+", output.text) for output in found[:3])
    assert (found[3].text, eos in found[3].token_ids) == ("alphabet", False)


@pytest.mark.parametrize("speculation", [None, CHAIN], ids=["plain", "chain"])
def test_min_tokens_gives_way_where_the_form_lets_only_stop_tokens_follow(plain, speculation):
    llm = make(speculative_config=speculation)
    texts = [llm.tokenizer.decode([token]) for token in range(len(llm.tokenizer))]
    dots, letters = ([t for t, text in enumerate(texts) if text and set(text) <= set(some)] for some in (".", "ab."))
    eos = f"<[{llm.tokenizer.eos_token_id}]>"
    many = dict(min_tokens=12, max_tokens=20, seed=3)
    cases = [
        # Dots only, and all of them are stop tokens: the first one after min_tokens stops.
        (params_of({"regex": "[.]{200}"}, stop_token_ids=dots, **many), 13, dots),
        # A word of stop tokens: the output ends with its form.
        (params_of({"regex": "a[.]b"}, stop_token_ids=letters, **many), None, [None]),
        # EOS is the only token that may follow, because the grammar names it.
        (params_of({"grammar": f"start: /[xy]{{3}}/ {eos}"}, **many), None, [None]),
        # Where another token may follow, stop tokens wait.
        (params_of({"regex": "[.x]{200}"}, stop_token_ids=dots, logit_bias=dict.fromkeys(dots, 99), **many), 13, dots),
        # Without min_tokens they stop at once.
        (params_of({"regex": "[.]{200}"}, stop_token_ids=dots, max_tokens=20, seed=3), 1, dots),
    ]
    wanted = [params for params, *_ in cases]
    found = outputs_of(llm, [PROMPTS[0]] * len(cases), wanted)
    for output, (_, number, stopped_by) in zip(found, cases):
        assert output.finish_reason == "stop"
        assert output.stop_reason in stopped_by
        assert number in (None, len(output.token_ids))
    assert [found[1].text, re.sub("[xy]{3}", "", found[2].text)] == ["a.b", ""]
    assert set(found[3].token_ids[:12]).isdisjoint(dots)
    assert [output.token_ids for output in found] == [
        outputs_of(plain, PROMPTS[0], params)[0].token_ids for params in wanted
    ]


def test_several_outputs_and_a_stream_are_those_of_one(plain):
    params = params_of(FORMS["compact"], seed=3)
    several = plain.generate(PROMPTS[0], params_of(FORMS["compact"], seed=3, n=3))[0].outputs
    one = outputs_of(plain, PROMPTS[0], params)[0]
    assert several[0].token_ids == one.token_ids
    assert "".join(plain.stream(PROMPTS[0], params)) == one.text


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("owner", "name"), [(Engine, "_hand_back"), (GrowingText, "of")], ids=["engine", "stream"])
def test_a_step_that_breaks_off_changes_nothing(expected, raising, owner, name, late):
    llm = make(speculative_config=CHAIN)
    llm.engine.steps_late = late
    request = llm.session.submit(ASKED[2], WANTED[2]).requests[0]
    for place in (1, 3):
        with raising(owner, name, place), suppress(MemoryError):
            list(llm.stream(ASKED[0], WANTED[0]))
    while not request.finished:
        llm.engine.step()
    assert (request.output_token_ids, request.finish_reason) == expected[2]


def test_an_output_that_cannot_start_over_ends_at_once(expected, raising, monkeypatch):
    """No further token is drawn by a mask of another place."""

    def break_down(matcher, _):
        matcher.error = "too many states"
        return BROKEN

    llm = make()
    request = llm.session.submit(ASKED[2], WANTED[2]).requests[0]
    for _ in range(4):
        llm.engine.step()
    monkeypatch.setattr(Matcher, "start_over", break_down)
    with raising(Engine, "_hand_back", 1), suppress(MemoryError):
        llm.engine.step()
    assert (request.finish_reason, request.stop_reason) == ("error", "too many states")
    assert request.output_token_ids == expected[2][0][: request.num_settled]
    assert request.num_settled > 2
    llm.engine.check()


def test_drafts_that_are_not_forced_change_nothing(target_folder, head_folder, tmp_path, monkeypatch):
    """A wrong guess, beside nodes without a token, which are computed as if they held the token 0, an exclamation mark."""
    save_tree(Tree((-1, 0, 0, 1, 2), (0, 0, 1, 0, 1)), tmp_path / "tree.json")
    params = [SamplingParams(seed=i, max_tokens=40, structured_outputs=PAIRS) for i in range(4)]
    expected = outputs_of(LLM(str(target_folder), device="cpu"), ["x"] * 4, params)
    config = {"model": str(head_folder), "tree": str(tmp_path / "tree.json")}
    llm = LLM(str(target_folder), device="cpu", speculative_config=config)
    tokens = llm.tokenizer("$%", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(Matcher, "_drafted", lambda *_: tokens)
    found = outputs_of(llm, ["x"] * 4, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert all(0 in output.token_ids and re.fullmatch("(!#|[$]%)+", output.text) for output in found)
    counts = [output.spec_decode_metrics for output in found]
    assert 0 < sum(c.num_accepted_tokens for c in counts) < sum(c.num_draft_tokens for c in counts)


def test_what_the_prompt_has_is_drafted_within_a_form(plain):
    """The model copies a list that it has begun to copy; no word of it is forced."""
    prompt = "import os\nimport re\nimport sys\nimport json\n" * 6
    params = params_of({"regex": r"(import [a-z]{2,9}\n){1,8}"}, seed=1, temperature=0.0)
    llm = make(speculative_config={"model": str(HEADS), "num_speculative_tokens": 4})
    expected, found = (outputs_of(one, prompt, params)[0] for one in (plain, llm))
    assert found.token_ids == expected.token_ids
    metrics = found.spec_decode_metrics
    assert metrics.num_accepted_tokens > metrics.num_steps


def test_a_prompt_is_indexed_once_and_not_before_its_first_token(monkeypatch):
    llm, prompts, indexed = make(speculative_config=CHAIN), [[*range(60, 120)], [*range(70, 130)]], []

    def noted(lookup, prompt_token_ids=(), work=PromptLookup.__init__):
        indexed.append(list(prompt_token_ids))
        work(lookup, prompt_token_ids)

    monkeypatch.setattr(PromptLookup, "__init__", noted)
    submissions = [llm.session.submit(prompt, params_of(FORMS["regex"], seed=1, n=3)) for prompt in prompts]
    assert not indexed
    while not all(submission.finished for submission in submissions):
        llm.engine.step()
    assert sorted(indexed) == prompts


def test_what_has_ended_holds_no_form():
    llm = make(max_num_seqs=2)
    short, long = (params_of({"regex": f"[a-z]{{{n}}}x"}, n=n) for n in (2, 30))
    ended, cut, runs = [llm.session.submit(PROMPTS[0], params) for params in (short, long, long)]
    llm.session.cancel(cut)
    while not ended.finished:
        llm.engine.step()
    assert len(llm.session.grammars._alive) == 2
    llm.session.grammars._compiled.clear()
    assert [form for form in llm.session.grammars._alive if "{2}" in form] == []
    assert len(llm.session.grammars._alive) == 1
    llm.session.cancel(runs)
    assert len(llm.session.grammars._alive) == 0


def test_a_verifier_that_keeps_the_distribution_keeps_the_form():
    llm = make(speculative_config=CHAIN | {"verifier": "token"})
    params = [params_of(FORMS[name], seed=1) for name in ("regex", "choice", "free")]
    found = outputs_of(llm, [PROMPTS[0]] * 3, params)
    assert has_form("regex", found[0].text)
    assert has_form("choice", found[1].text)
    assert found[2].spec_decode_metrics.num_accepted_tokens > 0


def test_a_grammar_beyond_the_limits_ends_its_own_output_only(plain):
    growing = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(200))
    too_much = {"grammar": f'start: /[xy]/ a0\n{growing}\na200: "x"'}
    found = outputs_of(plain, [PROMPTS[0]] * 2, [params_of(too_much, seed=1), params_of(FORMS["choice"], seed=1)])
    assert found[0].finish_reason == "error"
    assert "many items" in found[0].stop_reason
    assert re.fullmatch("[xy]x*", found[0].text)
    assert has_form("choice", found[1].text)


def test_what_cannot_be_followed_is_refused_before_any_work(plain, target_folder):
    good = StructuredOutputsParams(regex="a+")
    for given, words in (
        (dict(structured_outputs={"regex": "a+"}), "structured_outputs must be None or StructuredOutputsParams"),
        (dict(structured_outputs=good, allowed_token_ids=[1]), "allowed_token_ids must be left out"),
        (dict(structured_outputs=good, bad_words=["a"]), "bad_words must be left out"),
    ):
        with pytest.raises(ValueError, match=words):
            SamplingParams(**given)
    before = plain.get_stats()
    with pytest.raises(ValueError, match="structured_outputs regex cannot be followed"):
        plain.generate(PROMPTS[:2], [SamplingParams(), params_of({"regex": "a("})])
    assert plain.get_stats() == before
    bare = LLM(plain, tokenizer=None)
    bare.session.grammars._tokenizer = None
    with pytest.raises(ValueError, match="need a fast tokenizer"):
        bare.generate([[1, 2]], params_of({"regex": "a+"}))


def test_requests_without_a_grammar_make_no_table(plain):
    llm = make()
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=2, presence_penalty=1.0))
    state = llm.engine.seats.logit_state
    assert state.tables.masks is None
    assert state.host_drafts is None
    assert plain.engine.seats.logit_state.tables.masks is not None or plain.engine.metrics.num_generated_tokens == 0


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_graphs_keep_form_and_bits(speculation):
    """On a GPU, where the host launches a step before it has read the last one."""
    alone = make(device="cuda", dtype="bfloat16", max_num_seqs=1, enforce_eager=True)
    expected = [outputs_of(alone, prompt, params)[0].token_ids for prompt, params in zip(ASKED, WANTED)]
    llm = make(device="cuda", dtype="bfloat16", speculative_config=speculation)
    captures = llm.engine.graphs.num_captures
    for _ in range(2):
        assert [output.token_ids for output in outputs_of(llm, ASKED, WANTED)] == expected
    assert llm.engine.graphs.num_captures > captures
    captures = llm.engine.graphs.num_captures
    assert outputs_of(llm, ASKED[0], WANTED[0])[0].token_ids == expected[0]
    assert llm.engine.graphs.num_captures == captures, "free text goes on in the graphs made at the start"
