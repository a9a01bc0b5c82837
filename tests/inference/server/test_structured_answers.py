"""response_format and structured_outputs over a real socket: the official client's own helpers, streams, and what is refused."""

import json
import re
import threading
import time
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from headstart import SamplingParams, StructuredOutputsParams
from headstart.inference.grammar import grammars
from headstart.inference.grammar.library import GROWTH
from headstart.inference.server.driver.engine_loop import EngineLoop
from headstart.inference.server.driver.messages import Accepted, Cancel, Submit
from headstart.inference.server.driver.wire import Closed
from headstart.tests.inference.server.serving import NAME, PROMPTS

pytest.importorskip("llguidance")

MESSAGES = [{"role": "user", "content": PROMPTS[0]}]


class Tags(BaseModel):
    name: Literal["read", "write"]
    lines: Literal[1, 2, 3]
    tags: list[Literal["a", "b"]]


SCHEMA = Tags.model_json_schema() | {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "tags", "schema": SCHEMA, "strict": True}}
SAMPLED = dict(model=NAME, temperature=1.0, max_tokens=60)


def own(plain_llm, form, **params):
    params = SamplingParams(
        temperature=1.0, max_tokens=60, structured_outputs=StructuredOutputsParams(**form), **params
    )
    return plain_llm.chat(MESSAGES, params)[0].outputs[0]


def test_the_clients_own_parser_gets_an_object(client):
    answer = client.chat.completions.parse(
        messages=MESSAGES, response_format=Tags, seed=2, **SAMPLED | {"max_tokens": 400}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Tags)


def test_answers_whole_and_streamed_are_those_of_llm(client, plain_llm):
    for seed in range(2):
        expected = own(plain_llm, {"json": SCHEMA}, seed=seed)
        given = dict(messages=MESSAGES, response_format=FORMAT, seed=seed, **SAMPLED)
        whole = client.chat.completions.create(**given).choices[0]
        assert (whole.message.content, whole.finish_reason) == (expected.text, expected.finish_reason)
        events = [event.choices[0] for event in client.chat.completions.create(stream=True, **given)]
        assert "".join(event.delta.content or "" for event in events) == expected.text
        assert events[-1].finish_reason == expected.finish_reason
        if expected.finish_reason == "stop":
            Tags.model_validate_json(expected.text)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]{1,3}"}, "[ab]{3}-[0-9]{1,3}"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"grammar": 'root ::= "f(" [a-z] [a-z]? ("," [a-z])? ")"'}, r"f\([a-z]{1,2}(,[a-z])?\)"),
        ({"json": '{"enum": [1, "x"]}'}, '1|"x"'),
        ({"json": {"enum": [[1, 2]]}, "disable_any_whitespace": True}, r"\[1,2\]"),
        ({"json": {"enum": [[1, 2]]}, "whitespace_pattern": " {2}"}, r"\[( {2})?1( {2})?,( {2})?2( {2})?\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_forms_are_vllms(client, form, pattern):
    answer = client.completions.create(
        prompt=PROMPTS[1], n=3, seed=4, extra_body={"structured_outputs": form}, **SAMPLED
    )
    for choice in answer.choices:
        assert choice.finish_reason == "length" or re.fullmatch(pattern, choice.text), choice.text
    assert any(choice.finish_reason == "stop" for choice in answer.choices)


def test_any_object(client):
    for given in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
        choice = client.chat.completions.create(
            messages=MESSAGES, response_format=given, seed=1, logit_bias={"2": 50}, **SAMPLED | {"max_tokens": 200}
        ).choices[0]
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
        assert choice.message.content.startswith("{")


BLOWN = {"allOf": [{"oneOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(12)]}
BAD = [
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format", "Invalid type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": BLOWN}}}, "response_format", "too large"),
    ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "response_format", "one of them"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"regexp": "x"}}, "structured_outputs", "did you mean 'regex'"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "write a grammar"),
    ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids", "left out"),
    ({"guided_json": {}}, "guided_json", "structured_outputs"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: str(case[0])[:60])
def test_a_form_that_cannot_be_followed_is_refused_before_any_work(http, case):
    given, param, words = case
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 4, "stream": True} | given)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_a_grammar_that_goes_beyond_the_limits_on_the_way_is_told(client, http):
    def num_errors():
        return float(re.search(r'vllm:request_success_total{[^}]*="error"[^}]*} (.*)', http.get("/metrics").text)[1])

    before = num_errors()
    growing = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(200))
    form = {"structured_outputs": {"grammar": f'start: /[xy]/ a0\n{growing}\na200: "x"'}}
    with pytest.raises(openai.BadRequestError, match="cannot be followed further"):
        client.completions.create(prompt="x", extra_body=form, **SAMPLED)
    with pytest.raises(openai.APIError, match="cannot be followed further"):
        list(client.completions.create(prompt="x", stream=True, extra_body=form, **SAMPLED))
    assert num_errors() == before + 2
    good = {"structured_outputs": {"choice": ["fine"]}}
    assert client.completions.create(prompt="x", extra_body=good, **SAMPLED).choices[0].text == "fine"


def test_forms_that_wait_to_be_tried_hold_up_nobody_without_one(served, http):
    """More of them than the event loop's own executor has threads, 32 at most."""
    assert http.post("/v1/completions", json={"prompt": "x", "structured_outputs": {"regex": "a"}}).status_code == 200
    done = []

    def ask(i):
        body = {"prompt": "x", "structured_outputs": {"choice": [f"w{i}"]}}
        done.append(httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(33)]
    with served.service._grammars._trial._lock:
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=20).status_code == 200
        assert done == []
    for thread in threads:
        thread.join()
    assert sorted(done) == sorted(f"w{i}" for i in range(33))


def test_forms_of_clients_that_have_left_are_not_tried(served, http, monkeypatch):
    asked = []

    def check(params, work=served.service._grammars.check):
        asked.append(params.choice)
        return work(params)

    monkeypatch.setattr(served.service._grammars, "check", check)
    forms, futures = served.service._forms, []

    def submit(*work, own=forms.submit):
        futures.append(own(*work))
        return futures[-1]

    monkeypatch.setattr(forms, "submit", submit)
    body = {"prompt": "x", "structured_outputs": {"choice": ["first"]}}
    assert http.post("/v1/completions", json=body).status_code == 200
    with served.service._grammars._trial._lock:
        for word in ("is tried", "left", "left too"):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{served.url}/v1/completions", json=body | {"structured_outputs": {"choice": [word]}}, timeout=0.3
                )
        end = time.monotonic() + 10
        while sum(future.cancelled() for future in futures) < 2:  # until the server has seen that they left
            assert time.monotonic() < end
            time.sleep(0.01)
    body["structured_outputs"]["choice"] = ["last"]
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "last"
    assert asked == [("first",), ("is tried",), ("last",)]


def test_a_grammar_that_is_compiled_holds_up_no_step_of_others(served, http, monkeypatch):
    """One is left by its client meanwhile, one goes on."""
    kept, begun, may = served.llm.session.grammars, threading.Event(), threading.Event()

    def compiled_slowly(grammar, work=kept.compile):
        begun.set()
        assert may.wait(30)
        return work(grammar)

    body, texts = {"prompt": "x", "structured_outputs": {"choice": ["compiled"]}}, []

    def ask():
        texts.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    monkeypatch.setattr(kept, "compile", compiled_slowly)
    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(20)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.2)
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=20).status_code == 200
    assert not texts
    may.set()
    thread.join()
    assert texts == ["compiled"]
    served.wait_until_idle()


class ScriptedWire:
    """A Wire that gives the loop commands, all at once, and calls look before every step, until all outputs have ended."""

    def __init__(self, commands, num_outputs, look):
        self.commands, self.num_open, self.look, self.answers = commands, num_outputs, look, {}
        self.accepted, self.queue_times, self.most_waiting = [], {}, 0

    def receive(self, wait):
        self.look()
        assert not (wait and self.num_open and not self.commands), "the loop waits for commands that do not come"
        if not self.num_open:
            raise Closed
        commands, self.commands = self.commands, []
        return commands

    def send(self, message):
        self.most_waiting = max(self.most_waiting, message[1]["gauges"]["num_requests_waiting"])
        for job, event in message[0]:
            if isinstance(event, Accepted):
                self.accepted.append(job)
            elif event[-1] is not None:
                assert job in self.accepted
                times = event[-1].times
                self.answers[job], self.queue_times[job] = event[2], times.scheduled_ts - times.queued_ts
                self.num_open -= 1

    def close(self):
        pass


def test_jobs_whose_forms_do_not_fit_wait_for_the_end_of_others(speculative, plain_llm, monkeypatch):
    """With room for two forms at once. Those of one form count once, and a client that leaves meanwhile holds up nobody."""
    session, seen = speculative().session, []
    forms = [StructuredOutputsParams(regex=f"[a-z]{{{90 + i}}}") for i in range(5)]
    forms = [forms[0]] * 4 + forms[1:]
    params = [SamplingParams(temperature=1.0, seed=i, structured_outputs=form) for i, form in enumerate(forms)]
    expected = [found.outputs[0].token_ids for found in plain_llm.generate([PROMPTS[0]] * len(forms), params)]
    monkeypatch.setattr(grammars, "MOST_BYTES", 2 * GROWTH + 2**20)

    def look():
        scheduler = session.engine.scheduler
        inside = [request.params.structured_outputs for request in [*scheduler.waiting, *scheduler.active]]
        seen.append((len(inside), len(set(inside))))

    commands = [Submit(i, [session.check(PROMPTS[0], one)], streamed=False) for i, one in enumerate(params)]
    left = len(commands) - 2
    wire = ScriptedWire([*commands, Cancel(left)], len(commands) - 1, look)
    assert EngineLoop(session, wire).run() == 0
    num_outputs, num_forms = map(max, zip(*seen))
    assert num_outputs >= 4
    assert num_forms == 2
    assert sorted(wire.accepted) == [i for i in range(len(commands)) if i != left]  # once each
    assert wire.most_waiting >= 3
    # The last one has waited for all others, from its arrival on.
    assert wire.queue_times[len(commands) - 1] == max(wire.queue_times.values())
    del expected[left]
    assert [wire.answers[i] for i in sorted(wire.answers)] == expected
