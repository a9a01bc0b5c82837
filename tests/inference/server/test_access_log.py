"""`--access-log json`: a line per request without its text, and a log that nobody takes stops no answer."""

import json
import logging
import os
import time

import httpx
import pytest

from headstart.inference.server.door import access_log
from headstart.inference.server.door.access_log import LineWriter
from headstart.tests.inference.server.serving import PROMPTS, running

SHORT = {"prompt": PROMPTS[1], "max_tokens": 8, "seed": 1, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 1800, "stream": True}


def lines_of(path, count):
    """The first lines of a log, once they are there."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if path.exists() and len(lines := path.read_text().splitlines()) >= count:
            return [json.loads(line) for line in lines]
        time.sleep(0.01)
    raise AssertionError(f"{count} lines never came")


def test_every_request_has_a_line_without_its_text(speculative, tmp_path):
    path = tmp_path / "access.jsonl"
    options = dict(access_log="json", access_log_file=str(path), api_keys=("secret",))
    with running(speculative(), **options) as server, httpx.Client(base_url=server.url) as http:
        http.headers["Authorization"] = "Bearer secret"
        whole = http.post("/v1/completions?x=secret", json=SHORT, headers={"X-Request-Id": "mine"})
        http.post("/v1/completions", json=SHORT | {"stream": True})
        http.get("/health", headers={"Authorization": ""})
        http.get("/v1/models", headers={"Authorization": "Bearer other"})
        with http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
        found = lines_of(path, 5)
    usage = whole.json()["usage"]
    told = [(line["method"], line["path"], line["status"], line["complete"]) for line in found]
    post = ("POST", "/v1/completions", 200)
    expected = [(*post, True), (*post, True), ("GET", "/health", 200, True), ("GET", "/v1/models", 401, True)]
    assert told == [*expected, (*post, False)]
    assert found[0]["request_id"] == "mine"
    assert found[0]["client"] == "127.0.0.1"
    assert found[0]["bytes"] == len(whole.content)
    for line in found[:2]:
        assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], 8)
        assert 0 < line["first_seconds"] <= line["seconds"]
    assert "prompt_tokens" not in found[2]
    assert 0 < found[4]["completion_tokens"] < 1800
    for text in ("secret", "read_lines", whole.json()["choices"][0]["text"].strip()):
        assert text not in path.read_text()


def test_a_stream_that_ends_with_an_error_is_not_complete(speculative, tmp_path):
    path = tmp_path / "access.jsonl"
    options = dict(access_log="json", access_log_file=str(path), request_timeout=0.2)
    with running(speculative(), **options) as server, httpx.Client(base_url=server.url) as http:
        assert "--request-timeout" in http.post("/v1/completions", json=LONG).text
        (line,) = lines_of(path, 1)
    assert (line["status"], line["complete"]) == (200, False)


def test_a_full_disk_costs_the_lines_alone(speculative, caplog, monkeypatch):
    with running(speculative(), access_log="json", access_log_file="/dev/full") as server:
        with httpx.Client(base_url=server.url) as http, caplog.at_level(logging.WARNING, "headstart.server"):
            for _ in range(3):
                assert http.post("/v1/completions", json=SHORT).status_code == 200
                time.sleep(0.05)
        assert caplog.text.count("the access log cannot be written: No space left") == 1


def test_a_file_that_was_moved_is_made_anew_and_a_torn_line_is_closed(tmp_path):
    path, moved = tmp_path / "log", tmp_path / "old"
    writer = LineWriter(str(path))
    writer.write('{"a":1}')
    lines_of(path, 1)
    path.rename(moved)
    path.mkdir()  # cannot be written
    writer.write('{"b":1}')
    time.sleep(0.2)
    path.rmdir()
    writer.write('{"c":1}')
    writer.close()
    assert moved.read_text() == '{"a":1}\n'
    assert path.read_text() == '\n{"c":1}\n'


@pytest.mark.parametrize("reader", ["has left", "stands still"])
def test_a_pipe_that_nobody_reads_stops_nobody(reader, monkeypatch):
    out, into = os.pipe()
    monkeypatch.setattr(access_log, "STDOUT", into)
    monkeypatch.setattr(access_log, "LAST", 0.1)
    writer = LineWriter()
    try:
        if reader == "has left":
            os.close(out)
        start = time.monotonic()
        for _ in range(3 * access_log.MOST_WAITING):
            writer.write("x" * 100)
        writer.close()
        assert time.monotonic() - start < 5
        assert writer.num_lost > access_log.MOST_WAITING  # what it holds is bounded, however fast lines come
    finally:
        if reader == "stands still":  # the thread that waits ends
            os.close(out)
            writer._waiting.put(None)
        writer._thread.join(5)
        os.close(into)
