"""`bench engine --text`: what is asked of the engine, what its streams are told, and what an error does."""

import threading

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.benchmarks.engine.streamed import record_streamed_steps
from headstart.inference.server.driver.messages import Accepted, Tokens
from headstart.inference.server.driver.wire import Wire
from headstart.inference.session import Session


def test_engine_measures_requests_that_ask_the_host_for_text(bench, monkeypatch):
    asked, check = [], Session.check
    monkeypatch.setattr(
        Session, "check", lambda self, prompt, params, *rest: asked.append(params) or check(self, prompt, params, *rest)
    )
    sent, send = [], Wire.send
    monkeypatch.setattr(Wire, "send", lambda self, message: sent.append(message) or send(self, message))
    _, found = bench(
        "engine", "--head", "none", "--batch", "2", "--text", "--prompt-tokens", "20", "--new-tokens", "60", "--no-startup"
    )  # fmt: skip
    assert [row["draft"] for row in found["rows"]] == ["plain", "plain, text", "plain, streamed"]
    assert [bool(params.stop) for params in asked[-6::2]] == [False, True, True]
    assert [params.logprobs for params in asked[-6::2]] == [None, 5, 5]
    # Streamed: every step tells the tokens that it made.
    told = [(job, event) for news, _ in sent for job, event in news if not isinstance(event, Accepted)]
    for number in range(2):
        events = [Tokens(*event) for job, event in told if job == number]
        assert [len(event.token_ids) for event in events] == [1] * 60
        assert all(len(event.logprobs.entries()[0]) >= 5 for event in events)
        assert events[-1].end.finish_reason == "length"


@pytest.mark.parametrize(
    ("method", "error"),
    [("submit", ValueError("too long")), ("step", torch.OutOfMemoryError("full")), ("step", KeyboardInterrupt())],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_error_while_the_engine_streams_is_raised(tiny_target, monkeypatch, method, error):
    llm = LLM(str(tiny_target), dtype="float32", max_num_seqs=2)

    def fail(*given, **named):
        raise error

    monkeypatch.setattr(llm.session, method, fail)
    with pytest.raises(type(error)) as raised:
        record_streamed_steps(llm.session, [[5, 6], [7, 8]], SamplingParams(max_tokens=3))
    assert raised.value is error
    assert not llm.engine.scheduler.has_unfinished
    assert "streams" not in {thread.name for thread in threading.enumerate()}
