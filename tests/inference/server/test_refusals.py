"""What is refused: every bad field by its name, keys, hosts, content types, bodies. And nothing of a prompt in the logs."""

import json
import logging
import socket

import httpx
import openai
import pytest

from headstart.inference.server.options import ServerOptions
from headstart.tests.inference.server.serving import NAME, PROMPTS, running

TEXT, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/tokenize"
MESSAGES = [{"role": "user", "content": "x"}]
FUNCTION = [{"type": "function", "function": {"name": "f"}}]

# route, what is changed of a good body, status, the field that is named, words
BAD = [
    (TEXT, {"nonsense": 1}, 400, "nonsense", "unknown field"),
    (TEXT, {"temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
    (CHAT, {"echo": True}, 400, "echo", "unknown field"),
    (TEXT, {"best_of": 3}, 400, "best_of", "ask for n outputs"),
    (TEXT, {"suffix": "x"}, 400, "suffix", "is OpenAI's or vLLM's, and not supported here"),
    (CHAT, {"tools": FUNCTION}, 400, "tools", "its chat template does not render them"),
    (CHAT, {"functions": FUNCTION}, 400, "functions", "tools and tool_choice"),
    (CHAT, {"chat_template": "{{ x }}"}, 400, "chat_template", "the server's"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs", "cannot set 'tokenize'"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs", "cannot set"),
    (CHAT, {"chat_template_kwargs": {"return_dict": True}}, 400, "chat_template_kwargs", "cannot set"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "cannot set"),
    (TEXT, {"model": "another"}, 404, "model", "not served"),
    (TEXT, {"model": 3}, 400, "model", "string"),
    (TEXT, {"temperature": -1}, 400, "temperature", "temperature must be"),
    (TEXT, {"temperature": "1"}, 400, "temperature", "number"),
    (TEXT, {"temperature": 1e400}, 400, "temperature", ""),
    (TEXT, {"top_p": 0}, 400, "top_p", "(0, 1]"),
    (TEXT, {"top_k": 2**40}, 400, "top_k", "top_k must be"),
    (TEXT, {"n": 0}, 400, "n", "at least 1"),
    (TEXT, {"n": 129}, 400, "n", "at most 128"),
    (TEXT, {"n": True}, 400, "n", "integer"),
    (TEXT, {"seed": -2}, 400, "seed", "2^63"),
    (TEXT, {"seed": 2**64}, 400, "seed", "2^63"),
    (TEXT, {"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    (TEXT, {"max_tokens": -5}, 400, "max_tokens", "at least 1"),
    (TEXT, {"min_tokens": 30}, 400, "min_tokens", "from 0 to max_tokens"),
    (TEXT, {"logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    (TEXT, {"logprobs": -1}, 400, "logprobs", "from 0 to 20"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, 400, "top_logprobs", "from 0 to 20"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
    (TEXT, {"prompt_logprobs": 2, "stream": True}, 400, "prompt_logprobs", "whole answers"),
    (TEXT, {"stream_options": {}}, 400, "stream_options", "needs stream"),
    (TEXT, {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options", "x"),
    (TEXT, {"stop": [""]}, 400, "stop", "stop must be"),
    (TEXT, {"stop": ["x"] * 17}, 400, "stop", "at most 16"),
    (TEXT, {"stop": "x" * 2000}, 400, "stop", "at most 1000"),
    (TEXT, {"stop": [3]}, 400, "stop", "string"),
    (TEXT, {"logit_bias": {"x": 1}}, 400, "logit_bias", "logit_bias must be"),
    (TEXT, {"logit_bias": {"1": 101}}, 400, "logit_bias", "from -100 to 100"),
    (TEXT, {"logit_bias": {"999999": 1}}, 400, "logit_bias", "the vocabulary has"),
    (TEXT, {"logit_bias": {str(i): 1 for i in range(2000)}}, 400, "logit_bias", "at most 1024"),
    (TEXT, {"allowed_token_ids": []}, 400, "allowed_token_ids", "at least one"),
    (TEXT, {"bad_words": [" "]}, 400, "bad_words", "white space"),
    (TEXT, {"prompt": ""}, 400, "prompt", "is empty"),
    (TEXT, {"prompt": []}, 400, "prompt", "is empty"),
    (TEXT, {"prompt": [[]]}, 400, "prompt", "is empty"),
    (TEXT, {"prompt": [10**9]}, 400, "prompt", "token ids from 0"),
    (TEXT, {"prompt": [-1]}, 400, "prompt", "token ids from 0"),
    (TEXT, {"prompt": ["x", 3]}, 400, "prompt", ""),
    (TEXT, {"prompt": None}, 400, "prompt", ""),
    (TEXT, {"prompt": ["x"] * 1025}, 400, "prompt", "at most 1024 per request"),
    (TEXT, {"prompt": "x " * 3000}, 400, "prompt", "max_model_len"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1 item"),
    (CHAT, {"messages": "x"}, 400, "messages", "array"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "needs 'content'"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages", "unknown role"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
        "only {'type': 'text'",
    ),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message", ""),
    (TOKENS, {"prompt": "x", "messages": MESSAGES}, 400, "messages", "unknown field"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "ids from 0"),
]


def shown(case):
    return f"{case[0].rsplit('/', 1)[1]} {str(case[1])[:40]}"


@pytest.mark.parametrize("case", BAD, ids=shown)
def test_a_bad_field_is_named(http, case):
    path, change, status, param, words = case
    good = {TEXT: {"prompt": "x", "max_tokens": 4}, CHAT: {"messages": MESSAGES, "max_tokens": 4}}
    body = json.dumps(good.get(path, {}) | change)  # 1e400 becomes Infinity, as some clients would send it
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_values_that_ask_for_nothing_are_taken(http):
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "user": "x"}
    nothing |= {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "stop": None, "logit_bias": None}
    answer = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2, **nothing})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\xff"}', b"[" * 50000, b'{"prompt": "\\ud800"}', b'{"prompt": NaN}',
     b'{"a":' * 3000 + b"1" + b"}" * 3000, b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", b"\x00\x01"],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(http, body):
    answer = http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_unknown_routes_and_methods_are_refused_in_the_same_shape(http):
    for method, path, status in (("GET", "/nothing", 404), ("GET", TEXT, 405), ("POST", "/v1/models", 405)):
        answer = http.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (
            "this server answers POST /v1/completions, POST /v1/chat/completions, " in answer.json()["error"]["message"]
        )


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_only_json_is_taken(http, kind):
    headers = {"Content-Type": kind} if kind else {}
    answer = http.post(TEXT, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:80", 200), ("LOCALHOST", 200), ("evil.example", 403), ("", 403),
     ("localhost.evil.example", 403), ("evil.example:8000", 403)],
)  # fmt: skip
def test_other_hosts_are_refused_on_loopback(http, host, status):
    answer = http.get("/v1/models", headers={"Host": host})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


def test_a_request_is_named(http):
    assert http.get("/health", headers={"X-Request-Id": "mine-1.x"}).headers["x-request-id"] == "mine-1.x"
    answer = http.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"
    strange = http.get("/health", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert len(strange) == 32
    assert "x-request-id" in http.get("/nothing").headers


def test_a_body_beyond_the_limit_is_refused_while_it_comes(speculative):
    with running(speculative(), max_body_bytes=1000) as server:
        with httpx.Client(base_url=server.url, timeout=10) as http:
            answer = http.post(TEXT, json={"prompt": "x" * 2000})
            assert (answer.status_code, "1000 bytes" in answer.text) == (413, True)
            assert http.post(TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200

        # Chunked, and never ending: nobody waits for its end.
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as endless:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            endless.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
            endless.sendall(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
            assert endless.recv(100).startswith(b"HTTP/1.1 413 ")


def test_nobody_without_the_key_gets_a_token(speculative):
    keys = ("right-key", "another")
    with running(speculative(), api_keys=keys) as server, httpx.Client(base_url=server.url, timeout=10) as http:
        good = {"prompt": "x", "max_tokens": 1}
        for header in (
            None,
            "",
            "Bearer",
            "Bearer wrong",
            "Bearer right-ke",
            "Bearer right-keyy",
            "Basic right-key",
            "right-key",
        ):
            headers = {} if header is None else {"Authorization": header}
            for path in (TEXT, CHAT, TOKENS, "/detokenize", "/nothing"):
                answer = http.post(path, json=good, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/metrics", "/version", "//v1/models", "/health/../v1/models"):
                assert http.get(path, headers=headers).status_code == 401
            assert [http.get(path, headers=headers).status_code for path in ("/health", "/ping")] == [200, 200]
        for key in keys:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                assert client.completions.create(model=NAME, **good).choices[0].finish_reason == "length"
        stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model=NAME, **good)


def test_an_address_that_others_reach_needs_a_key():
    for host in ("0.0.0.0", "192.168.1.2", "::", "some.name"):
        with pytest.raises(ValueError, match="can be reached from other machines"):
            ServerOptions(host=host)
        assert ServerOptions(host=host, api_keys=("k",)).hosts is None
    assert ServerOptions(host="::1").hosts >= {"localhost", "::1"}
    assert ServerOptions(allowed_hosts=("Api.Example",)).hosts == {"api.example"}
    assert ServerOptions(allowed_hosts=("*",)).hosts is None


@pytest.mark.parametrize("bad", [{"port": 70000}, {"api_keys": ("",)}, {"max_n": 0}, {"write_timeout": 0}])
def test_bad_options_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad)).split("_")[0]):
        ServerOptions(**bad)


def test_a_failure_of_a_route_tells_and_logs_neither_place_nor_prompt(speculative, caplog, monkeypatch):
    secret = "my secret words"
    with running(speculative()) as server, httpx.Client(base_url=server.url, timeout=10) as http:
        caplog.set_level(logging.DEBUG, logger="headstart.server")
        assert http.post(TEXT, json={"prompt": secret, "max_tokens": 2}).status_code == 200
        assert http.post(TEXT, json={"prompt": secret, "max_tokens": 0}).status_code == 400

        def broken(fields):
            raise RuntimeError(f"broke on {fields.prompt}")

        monkeypatch.setattr(server.service, "check_model", broken)
        answer = http.post(TEXT, json={"prompt": secret})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "broke" not in answer.text
    assert "RuntimeError at" in caplog.text
    assert secret not in caplog.text


def test_figures_have_the_names_of_vllm(speculative):
    with running(speculative()) as server, httpx.Client(base_url=server.url, timeout=10) as http:
        http.post(TEXT, json={"prompt": PROMPTS[1], "max_tokens": 20, "temperature": 0})
        http.post(TEXT, json={"prompt": PROMPTS[1], "max_tokens": 20, "temperature": 0, "stream": True})
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    labels = f'{{engine="0",model_name="{NAME}"}}'
    values = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert values[f"vllm:generation_tokens_total{labels}"] == 40
    assert values[f"vllm:num_requests_running{labels}"] == 0
    assert values[f"vllm:num_requests_waiting{labels}"] == 0
    assert values[f"vllm:time_to_first_token_seconds_count{labels}"] == 2
    assert values[f"vllm:e2e_request_latency_seconds_count{labels}"] == 2
    assert values[f"vllm:inter_token_latency_seconds_count{labels}"] >= 2
    assert values[f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{NAME}"}}'] == 2
    steps = values[f"vllm:spec_decode_num_drafts_total{labels}"]
    nodes, drafted = (
        values[f"headstart:spec_decode_num_draft_nodes_total{labels}"],
        values[f"vllm:spec_decode_num_draft_tokens_total{labels}"],
    )
    assert 0 < steps < 40
    assert nodes >= drafted > steps
    accepted = values[f"vllm:spec_decode_num_accepted_tokens_total{labels}"]
    start = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",'
    assert sum(value for name, value in values.items() if name.startswith(start)) == accepted
    for name in ("prompt_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "kv_cache_usage_perc"):
        assert f"vllm:{name}{labels}" in values


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_arguments_nested_too_deep_for_the_template_are_refused(served, path):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": ' + "[" * 900 + "]" * 900 + "}"},
    }
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = httpx.post(served.url + path, json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
