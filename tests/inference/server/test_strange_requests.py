"""Random changes of good requests, and failures inside: always an answer, never 500 for a client's mistake, nothing left over."""

import random

import httpx
import pytest

from headstart.benchmarks.proofs.serving import changed_request
from headstart.inference.server.driver import engine_client
from headstart.tests.inference.server.serving import PROMPTS, running


def test_random_changes_of_good_requests_are_answered(served, http):
    dice, counts = random.Random(7), {}
    for _ in range(400):
        path, text = changed_request(dice)
        answer = http.post(path, content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404), (text, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], text
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
    assert counts[200] > 20
    assert counts[400] > 100
    served.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_cannot_be_decoded_ends_alone(speculative, monkeypatch, stream):
    class Breaking(engine_client.GrowingOutput):
        def grow(self, tokens):
            if self.stop_checker.params.seed == 13:
                raise UnicodeError("no such byte")
            return super().grow(tokens)

    monkeypatch.setattr(engine_client, "GrowingOutput", Breaking)
    body = {"prompt": PROMPTS[1], "max_tokens": 12, "stream": stream}
    with running(speculative()) as server, httpx.Client(base_url=server.url, timeout=10) as http:
        answer = http.post("/v1/completions", json=body | {"seed": 13})
        assert answer.status_code == (200 if stream else 503)
        assert "could not be turned into text" in answer.text
        server.wait_until_idle()
        assert http.get("/health").status_code == 200
        assert "error" not in http.post("/v1/completions", json=body | {"seed": 14}).text
