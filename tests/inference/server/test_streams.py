"""Server-sent events: every rule of a stream, as OpenAI's clients and plain readers see it."""

import json

import httpx
import openai
import pytest

from headstart import SamplingParams
from headstart.tests.inference.server.serving import NAME, PROMPTS, running

MESSAGES = [{"role": "user", "content": PROMPTS[0]}]
CHAT = {"messages": MESSAGES, "temperature": 0.8, "max_tokens": 20, "seed": 4}
TEXT = {"prompt": PROMPTS[1], "temperature": 0.8, "max_tokens": 20, "seed": 4}


def events(http, path, **body):
    """The data of every event of a stream, JSON or [DONE]."""
    with http.stream("POST", path, json={"model": NAME, "stream": True, **body}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = []
        for block in answer.read().decode().split("\n\n"):
            if block:
                assert block.startswith("data: ")
                assert "\n" not in block
                data = block.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found


def test_a_conversation_streams_its_role_its_text_and_one_reason(http, plain_llm):
    *chunks, done = events(http, "/v1/chat/completions", **CHAT)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["object"] == "chat.completion.chunk" and len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    own = plain_llm.chat(MESSAGES, SamplingParams(temperature=0.8, max_tokens=20, seed=4))[0].outputs[0]
    assert [reason for reason in reasons if reason] == [reasons[-1]] == [own.finish_reason]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == own.text
    assert len(chunks) > 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_last_without_choices_if_asked_for(http, path):
    body = CHAT if "chat" in path else TEXT
    *chunks, last, _ = events(http, path, stream_options={"include_usage": True}, **body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 20
    assert all(chunk["usage"] is None for chunk in chunks)

    usual = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events(http, path, stream_options=usual, **body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 20
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_every_choice_has_its_index_and_one_reason(http):
    *chunks, _ = events(http, "/v1/completions", **TEXT | {"prompt": PROMPTS[:2], "n": 2})
    whole = http.post("/v1/completions", json={**TEXT, "prompt": PROMPTS[:2], "n": 2}).json()["choices"]
    for index in range(4):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [bool(one["finish_reason"]) for one in own] == [False] * (len(own) - 1) + [True]
        assert "".join(one["text"] for one in own) == whole[index]["text"]
    *chunks, _ = events(http, "/v1/chat/completions", **CHAT, n=2)
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert roles == [0, 1]


@pytest.mark.parametrize("stop", [["\n"], ["return", "def "], ["zzzz"]])
def test_no_piece_holds_what_a_stop_string_cuts_off(http, stop):
    body = CHAT | {"stop": stop, "max_tokens": 40}
    *chunks, _ = events(http, "/v1/chat/completions", **body)
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert chunks[-1]["choices"][0]["stop_reason"] == whole["stop_reason"]


def test_logprobs_and_token_ids_are_divided_over_the_pieces(http):
    body = TEXT | {"logprobs": 2, "echo": True, "return_token_ids": True}
    *chunks, _ = events(http, "/v1/completions", **body)
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for c in chunks for x in c["choices"][0]["logprobs"][name]] == whole["logprobs"][name]
    assert [x for c in chunks for x in c["choices"][0]["token_ids"]] == whole["token_ids"]
    given = [c["choices"][0]["prompt_token_ids"] for c in chunks]
    assert given == [whole["prompt_token_ids"]] + [None] * (len(chunks) - 1)

    body = CHAT | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    *chunks, _ = events(http, "/v1/chat/completions", **body)
    whole = http.post("/v1/chat/completions", json=body).json()
    told = [c["choices"][0]["logprobs"] for c in chunks]
    assert [x for one in told if one for x in one["content"]] == whole["choices"][0]["logprobs"]["content"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_drafts_are_counted_in_the_last_piece_if_asked_for(http):
    body = CHAT | {"return_speculation_metrics": True, "max_tokens": 40}
    for options in (None, {"include_usage": True}):
        *chunks, last, _ = events(http, "/v1/chat/completions", **body, stream_options=options)
        drafts = last["metrics"]["speculative_decoding"]
        assert 1 <= drafts["num_spec_steps"] < 40
        assert not any("metrics" in chunk for chunk in chunks)


def test_the_openai_client_reads_streams(client):
    whole = client.chat.completions.create(model=NAME, **CHAT)
    stream = client.chat.completions.create(model=NAME, stream=True, stream_options={"include_usage": True}, **CHAT)
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    with client.chat.completions.stream(model=NAME, **CHAT | {"temperature": 0, "max_tokens": 300}) as helped:
        final = helped.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert "return" in final.choices[0].message.content


def test_a_quiet_stream_is_kept_alive_by_comments(speculative):
    """A reader whose request waits for a seat sees that the connection lives."""
    with (
        running(speculative(max_num_seqs=1), keep_alive=0.05) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
        http.stream("POST", "/v1/completions", json=TEXT | {"max_tokens": 300, "stream": True, "ignore_eos": True}),
    ):
        server.wait_for(1)
        with http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": keep-alive"
            assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


def test_a_stream_that_breaks_off_says_so(speculative):
    """The engine fails in the middle: the stream ends with an error, later requests get 503, /health too."""
    llm = speculative()
    step, count = llm.engine.step, iter(range(10**6))

    def breaking():
        if next(count) == 4:
            raise MemoryError("out of memory")
        return step()

    llm.engine.step = breaking
    with running(llm) as server, httpx.Client(base_url=server.url, timeout=10) as http:
        assert http.get("/health").status_code == 200
        *_, error, done = events(http, "/v1/completions", **TEXT)
        assert (error["error"]["type"], done) == ("server_error", "[DONE]")
        for path in ("/health", "/ping"):
            assert http.get(path).status_code == 503
        for body in (TEXT, TEXT | {"stream": True}):
            answer = http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.InternalServerError):
            client.completions.create(model=NAME, **TEXT)
