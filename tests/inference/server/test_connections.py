"""Connections: how long a header may take, how many may be open, Unix sockets, TLS, other origins of browsers."""

import contextlib
import json
import socket
import ssl
import stat
import time
from pathlib import Path

import httpx
import pytest

from headstart.inference.server.door import connections
from headstart.inference.server.door.unix_socket import remove_socket, unix_socket
from headstart.inference.server.options import ServerOptions
from headstart.tests.inference.server.serving import PROMPTS, running

SHORT = {"prompt": PROMPTS[1], "max_tokens": 8, "seed": 1}
CERTIFICATE = str(Path(__file__).with_name("localhost.pem"))
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def limited(speculative):
    with running(speculative(), header_timeout=0.4) as server:
        yield server


def dial(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def seconds_until_closed(connection):
    start = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return time.monotonic() - start


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_header_that_does_not_come_ends_its_connection(limited, sent, is_first):
    with dial(limited) as slow:
        if not is_first:
            slow.sendall(HEALTH)
            assert slow.recv(1000).startswith(b"HTTP/1.1 200")
            sent = sent or b"G"  # uvicorn closes what is idle, after five seconds
        slow.sendall(sent)
        assert 0.2 < seconds_until_closed(slow) < 3


def test_bytes_one_by_one_gain_no_time(limited):
    with dial(limited) as slow:
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 4:
                slow.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - start < 3


def test_the_limit_of_a_header_is_none_of_the_body_and_the_answer(limited):
    body = json.dumps(SHORT).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with dial(limited) as slow:
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        time.sleep(0.8)
        slow.sendall(body[5:])
        assert slow.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_of_two_lengths_is_refused_with_all_that_follows(served):
    """Else a proxy and the server disagree where the next request starts."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with dial(served) as both:
        both.sendall(head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEALTH)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while some := both.recv(4096):
                said += some
    assert said.startswith(b"HTTP/1.1 400")
    assert said.count(b"HTTP/1.1") == 1


def test_connections_beyond_the_limit_are_told(speculative, monkeypatch):
    monkeypatch.setattr(connections, "SPARE", 2)
    with running(speculative(), max_connections=2) as server, contextlib.ExitStack() as opened:
        held = [opened.enter_context(dial(server)) for _ in range(2)]
        for connection in held:  # answered, so counted
            connection.sendall(HEALTH)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        with httpx.Client(base_url=server.url) as http:
            answer = http.post("/v1/completions", json=SHORT)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "too_many_connections")
            assert "--max-connections" in error["message"]
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
            opened.enter_context(dial(server))
            with dial(server) as unheard:
                assert seconds_until_closed(unheard) < 2
        for connection in held:
            connection.close()
        time.sleep(0.1)
        with httpx.Client(base_url=server.url) as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("for_all", [False, True])
def test_a_unix_socket_is_for_its_owner_unless_a_key_is_asked_for(speculative, tmp_path, for_all):
    path = str(tmp_path / "socket")
    unix_socket(path, for_all).close()  # left behind
    bound = unix_socket(path, for_all)
    with pytest.raises(ValueError, match="cannot listen on --uds"):  # of a server that loads its model
        unix_socket(path, for_all)
    with running(speculative(), bound=bound, uds=path) as server:
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(Path(path).stat().st_mode) == (0o666 if for_all else 0o600)
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://any.example") as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200
        with pytest.raises(ValueError, match="cannot listen on --uds"):
            unix_socket(path, for_all)
    remove_socket(path)
    remove_socket(path)
    assert not Path(path).exists()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="cannot listen on --uds"):
        unix_socket(str(tmp_path / "file"), for_all)
    assert (tmp_path / "file").read_text() == "kept"


def test_tls_and_certificates_of_clients(speculative):
    trusting = ssl.create_default_context(cafile=CERTIFICATE)
    with running(speculative(), ssl_certfile=CERTIFICATE) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=server.url, verify=trusting) as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")
    with running(speculative(), ssl_certfile=CERTIFICATE, ssl_ca_certs=CERTIFICATE) as server:
        with httpx.Client(base_url=server.url, verify=trusting) as http, pytest.raises(httpx.TransportError):
            http.get("/health")
        trusting.load_cert_chain(CERTIFICATE)
        with httpx.Client(base_url=server.url, verify=trusting) as http:
            assert http.get("/health").status_code == 200


def test_pages_of_other_origins_read_answers_only_if_they_are_named(speculative, served):
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    ours, others = {"Origin": "https://a.example"}, {"Origin": "https://b.example"}
    options = dict(allowed_origins=("https://a.example",), api_keys=("secret",))
    with running(speculative(), **options) as server, httpx.Client(base_url=server.url) as http:
        before = http.options("/v1/completions", headers=ours | asking)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == "https://a.example"
        assert http.options("/v1/completions", headers=others | asking).status_code == 400
        known = {"Authorization": "Bearer secret"}
        for headers, status in ((known, 200), ({}, 401)):
            answer = http.post("/v1/completions", json=SHORT, headers=ours | headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            assert answer.headers["access-control-expose-headers"] == "X-Request-Id"
        assert "access-control-allow-origin" not in http.post("/v1/completions", headers=others | known).headers
    with httpx.Client(base_url=served.url) as http:
        answer = http.options("/v1/completions", headers=ours | asking)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": CERTIFICATE}, "give --ssl-certfile"),
        ({"ssl_certfile": "/missing.pem"}, "TLS cannot use /missing.pem: No such file"),
        ({"ssl_certfile": __file__}, "TLS cannot use"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "name them in --allowed-origins"),
        ({"access_log_file": "x"}, "give --access-log json"),
        ({"access_log": "json", "access_log_file": "/missing/x"}, "cannot write --access-log-file"),
        ({"header_timeout": 0}, "--header-timeout must be"),
        ({"max_connections": 0}, "--max-connections must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        ServerOptions(**options)
