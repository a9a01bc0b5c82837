"""Random changes of good requests, and failures inside: always an answer, never 500 for a client's mistake, nothing left over."""

import json
import random

import httpx
import pytest

from headstart.inference.server.driver import engine_thread
from headstart.tests.inference.server.serving import PROMPTS, running

MESSAGES = [{"role": "user", "content": "x"}]
# fmt: off
JUNK = [
    None, None, None, True, False, 0, -1, 1, 3, 10**30, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "auto", "\x00", "\ufffd", "é" * 50, [], [[]], [None], [1, "x"], ["x"], [0], [[1, 2], [3]], [[[]]], [MESSAGES],
    {}, {"x": 1}, {"1": 1}, [{}], {"type": "text"},
]
FIELDS = [
    "model", "prompt", "messages", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids",
    "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "top_logprobs", "prompt_logprobs", "stream",
    "stream_options", "echo", "user", "tools", "response_format", "best_of", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "ignore_eos", "return_token_ids", "skip_special_tokens", "add_special_tokens", "max_completion_tokens",
    "include_stop_str_in_output", "return_tokens_as_token_ids", "cache_salt", "speculate", "return_speculation_tokens",
]
# fmt: on


def test_random_changes_of_good_requests_are_answered(served, http):
    dice, counts = random.Random(7), {}
    for _ in range(400):
        path = dice.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"])
        body = {"prompt": "x"} if path != "/v1/chat/completions" else {"messages": MESSAGES}
        if path != "/tokenize":
            body |= {"max_tokens": 2, "seed": 1}
        for _ in range(dice.choice([1, 1, 2])):
            body[dice.choice(FIELDS)] = dice.choice(JUNK)
        text = json.dumps(body).encode()
        if dice.random() < 0.1:
            text = text[: dice.randrange(len(text))] + bytes([dice.randrange(256)]) + text[dice.randrange(len(text)) :]
        if b"max_completion_tokens" in text and b'"max_completion_tokens": null' not in text:
            continue  # of a number it makes a long answer
        answer = http.post(path, content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404), (text, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], text
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
    assert counts[200] > 25
    assert counts[400] > 100
    served.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_cannot_be_decoded_ends_alone(speculative, monkeypatch, stream):
    class Breaking(engine_thread.GrowingOutput):
        def delta(self):
            if self.request.params.seed == 13:
                raise UnicodeError("no such byte")
            return super().delta()

    monkeypatch.setattr(engine_thread, "GrowingOutput", Breaking)
    body = {"prompt": PROMPTS[1], "max_tokens": 12, "stream": stream}
    with running(speculative()) as server, httpx.Client(base_url=server.url, timeout=10) as http:
        answer = http.post("/v1/completions", json=body | {"seed": 13})
        assert answer.status_code == (200 if stream else 503)
        assert "could not be turned into text" in answer.text
        server.wait_until_idle()
        assert http.get("/health").status_code == 200
        assert "error" not in http.post("/v1/completions", json=body | {"seed": 14}).text
