"""Clients that leave or do not read, and a full line."""

import socket
import time

import httpx
import pytest

from headstart.tests.inference.server.serving import LONG, PROMPTS, running

SHORT = {"prompt": PROMPTS[1], "temperature": 0.8, "max_tokens": 8, "seed": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_seats_and_pages(served, stream):
    with httpx.Client(base_url=served.url, timeout=30) as http:
        if stream:
            with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 2}) as answer:
                lines = answer.iter_lines()  # kept: its end closes the connection
                next(lines)
                assert served.llm.engine.num_free_pages < served.llm.engine.scheduler.num_pages
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=LONG | {"n": 2}, timeout=0.5)
        served.wait_until_idle(seconds=2)
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_a_client_that_leaves_while_it_waits_is_forgotten(served):
    with httpx.Client(base_url=served.url, timeout=30) as http:
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 8}):
            served.wait_for(8)
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=SHORT, timeout=0.3)
            deadline = time.monotonic() + 3
            while served.llm.engine.scheduler.waiting:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        served.wait_until_idle()


def raw_request(port, body, length=None):
    """A socket that has sent a POST to /v1/completions."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    return connection


def test_a_reader_that_stands_still_stops_nobody_and_is_left(speculative):
    with running(speculative(), write_timeout=0.5) as server:
        # Small buffers, and log-probabilities, which make the events long.
        server.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        body = b'{"prompt": "x", "stream": true, "n": 6, "max_tokens": 1800, "ignore_eos": true, "logprobs": 20}'
        connection = raw_request(server.port, body)
        server.wait_for(6)
        with httpx.Client(base_url=server.url, timeout=30) as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200
        server.wait_until_idle(seconds=12)
        connection.close()


def test_half_a_body_harms_nobody(served):
    connections = [raw_request(served.port, b'{"prompt": ', length=100) for _ in range(5)]
    connections[0].close()
    with httpx.Client(base_url=served.url, timeout=30) as http:
        assert http.post("/v1/completions", json=SHORT).status_code == 200
    for connection in connections:
        connection.close()
    served.wait_until_idle()


def test_a_body_that_comes_too_slowly_is_refused(speculative):
    with (
        running(speculative(), body_timeout=0.2) as server,
        raw_request(server.port, b'{"prompt": ', length=100) as connection,
    ):
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_request_that_takes_too_long_ends(speculative):
    with running(speculative(), request_timeout=0.5) as server, httpx.Client(base_url=server.url, timeout=10) as http:
        answer = http.post("/v1/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            text = answer.read().decode()
        assert '"code":"timeout"' in text.split("\n\n")[-3]
        assert text.endswith("data: [DONE]\n\n")
        server.wait_until_idle()
        # Also while its form waits to be tried, and while the engine does not answer.
        session, form = server.llm.session, SHORT | {"structured_outputs": {"regex": "a"}}
        assert http.post("/v1/completions", json=form).status_code == 200
        with server.service._grammars._trial._lock:
            answer = http.post("/v1/completions", json=form | {"structured_outputs": {"regex": "b"}})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        with session.grammars._lock:
            answer = http.post("/v1/completions", json=form)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        server.wait_until_idle()


def test_a_full_line_says_try_again(speculative):
    llm = speculative(max_num_seqs=2)
    with running(llm, max_waiting=1) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 3}) as answer:
            lines = answer.iter_lines()
            next(lines)
            full = http.post("/v1/completions", json=SHORT)
            assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(full.headers["retry-after"]) >= 1
            assert http.get("/health").status_code == 200
        server.wait_until_idle()
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        never = http.post("/v1/completions", json=SHORT | {"n": 4})
        assert never.status_code == 400


def test_a_prompt_that_never_fits_the_cache_is_refused(speculative):
    with running(speculative(num_gpu_blocks_override=6)) as server:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            answer = http.post("/v1/completions", json=LONG)
            assert answer.status_code == 400
            assert "cache holds" in answer.json()["error"]["message"]
        server.wait_until_idle()
