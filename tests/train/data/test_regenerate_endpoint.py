"""`headstart regenerate --endpoint` against a server process on loopback: what it asks, what it bears, what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli import main
from headstart.train.data import chat_endpoint
from headstart.train.data.chat_endpoint import completions_url
from headstart.train.data.conversations import load_conversations

SERVER = Path(__file__).with_name("chat_server.py")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(chat_endpoint, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(chat_endpoint, "LONGEST_WAIT", 0.02)
    monkeypatch.setattr(chat_endpoint, "ATTEMPTS", 4)
    for name in ("OPENAI_API_KEY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def serve(tmp_path):
    """serve(*options) -> (address, log) of a server process."""
    started = []

    def start(*options):
        log = tmp_path / f"requests-{len(started)}.jsonl"
        words = [sys.executable, str(SERVER), str(log), *map(str, options)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return f"http://127.0.0.1:{int(process.stdout.readline())}", log

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def regenerate(tmp_path, capsys):
    """regenerate(url, conversations, ...) -> (status, lines of the output or None, what it said)."""

    def run(url, conversations, *more, model="served", output="out.jsonl", concurrency=3):
        data = tmp_path / "data.jsonl"
        data.write_text("\n".join(json.dumps({"messages": one}) for one in conversations))
        words = ["regenerate", str(data), "--endpoint", url, "--model", model, "--output", str(tmp_path / output)]
        status = main([*words, "--concurrency", str(concurrency), *more])
        path = tmp_path / output
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None
        return status, lines, capsys.readouterr().err

    return run


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def asked(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def many(count):
    return [[user(f"q{i}"), assistant("old"), user(f"then {i}"), assistant("old")] for i in range(count)]


def test_every_turn_is_asked_behind_the_new_answers(serve, regenerate, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    url, log = serve()
    first = [{"role": "system", "content": "be brief"}, user("one"), assistant("old"), user("two"), assistant("old")]
    status, lines, said = regenerate(url, [first, [user("three")]], "--temperature", "0.5", "--max-tokens", "9")
    assert status == 0
    assert [line["conversation"] for line in lines] == [0, 1]
    bodies = {one["body"]["messages"][-1]["content"]: one["body"] for one in asked(log)}
    assert {one["path"] for one in asked(log)} == {"/v1/chat/completions"}
    assert {one["key"] for one in asked(log)} == {"Bearer secret-key"}
    seed = bodies["one"]["seed"]
    assert bodies["one"]["messages"] == first[:2]
    assert bodies["two"]["messages"] == [*first[:2], assistant(f"ONE {seed}"), user("two")]
    rest = {"model": "served", "temperature": 0.5, "top_p": 1.0, "max_tokens": 9}
    assert all({**body, "messages": 0, "seed": 0} == rest | {"messages": 0, "seed": 0} for body in bodies.values())
    seeds = [body["seed"] for body in bodies.values()]
    assert len(set(seeds)) == 3
    assert all(0 <= one < 2**31 for one in seeds)
    answer = {**assistant(f"TWO {bodies['two']['seed']}"), "finish_reason": "stop"}
    assert lines[0]["messages"][-1] == answer
    assert "2 of 2 conversations answered" in said
    assert "3 answers, 21 tokens" in said
    everything = "".join(path.read_text() for path in tmp_path.glob("out*"))
    assert "secret-key" not in said + everything
    assert len(load_conversations(str(tmp_path / "out.jsonl"))) == 2


@pytest.mark.parametrize("key", ["secret-key\n", "secret\nkey", "secret-këy", "secret\x07key"])
def test_key_is_shown_in_no_error(serve, regenerate, monkeypatch, tmp_path, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    url, log = serve("--status", 401)
    status, lines, said = regenerate(url, many(2))
    assert (status, lines) == (2, None)
    assert "OPENAI_API_KEY" in said
    assert "secret" not in said
    if key.endswith("\n"):  # as `export OPENAI_API_KEY=$(cat file)` of some shells leaves it
        assert {one["key"] for one in asked(log)} == {"Bearer secret-key"}
    else:
        assert "holds a line break, or something else than printable ASCII" in said
        assert not log.exists() or not asked(log)
        assert not list(tmp_path.glob("out*"))


def test_busy_server_is_asked_again(serve, regenerate):
    url, log = serve("--busy", 2)
    status, lines, said = regenerate(url, [[user("one")]])
    assert (status, len(lines), len(asked(log))) == (0, 1, 3)
    assert said.count("HTTP 503: still loading; trying again") == 2


def test_server_that_dies_in_the_middle_leaves_a_run_that_goes_on(serve, regenerate, tmp_path):
    url, _ = serve()
    _, whole, _ = regenerate(url, many(12), output="whole.jsonl")
    dying, log = serve("--die-after", 11)
    status, lines, said = regenerate(dying, many(12))
    assert (status, lines) == (2, None)
    assert "gave no answer in 4 attempts" in said
    assert "the same command goes on" in said
    first = {one["body"]["messages"][0]["content"] for one in asked(log)}
    url, log = serve()
    status, lines, said = regenerate(url, many(12))
    assert (status, lines) == (0, whole)
    again = {one["body"]["messages"][0]["content"] for one in asked(log)}
    assert again < {f"q{i}" for i in range(12)}
    assert first | again == {f"q{i}" for i in range(12)}
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("out")} == {
        "out.jsonl",
        "out.jsonl.made_from.json",
    }


def test_conversations_that_the_server_refuses_are_counted_by_reason(serve, regenerate):
    url, _ = serve()
    conversations = [
        [user("one")],
        [user("forbidden")],
        [user("too long")],
        [user("two"), assistant(""), user("too long")],
    ]
    conversations += [[user("cut"), assistant("old"), user("more"), assistant("old")], [user("filtered")]]
    status, lines, said = regenerate(url, conversations)
    assert status == 0
    assert [line["conversation"] for line in lines] == [0, 3, 4]
    assert [len(line["messages"]) for line in lines] == [2, 2, 2]
    assert lines[2]["messages"][1]["finish_reason"] == "length"
    assert "3 of 6 conversations answered" in said
    assert "1 too long for the model (one says: " in said
    assert "maximum context length is 8 tokens" in said
    assert "2 refused" in said
    assert "1 an answer cut at the limit of tokens" in said
    assert "3 answers (1 of them cut at --max-tokens)" in said


def test_endpoint_that_refuses_everything_stops_the_run_with_its_words(serve, regenerate, tmp_path):
    url, log = serve("--status", 400)
    status, lines, said = regenerate(url, many(300))
    assert (status, lines) == (2, None)
    assert "were all refused" in said
    assert "HTTP 400" in said
    assert "the server's own words" in said
    assert len(asked(log)) < 150
    # Nothing was made, so the corrected command is not held to the first one's settings.
    url, _ = serve()
    status, lines, _ = regenerate(url, many(3), model="corrected")
    assert (status, len(lines)) == (0, 3)


def test_few_conversations_all_refused_write_nothing(serve, regenerate, tmp_path):
    url, _ = serve("--status", 422)
    status, lines, said = regenerate(url, many(2))
    assert (status, lines) == (2, None)
    assert "no conversation could be answered: 2 refused" in said
    assert "the server's own words" in said
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--status", 401), "OPENAI_API_KEY, which is not set"),
        (("--status", 404), "--model must be the name that the server knows (asked for 'served')"),
        (("--status", 302, "--location", "http://127.0.0.1:9/v1"), "redirects are not followed"),
    ],
)
def test_what_no_request_can_get_past_stops_at_once(serve, regenerate, options, message):
    url, log = serve(*options)
    status, lines, said = regenerate(url, many(30), concurrency=1)
    assert (status, lines) == (2, None)
    assert message in said
    assert "the server's own words" in said
    assert len(asked(log)) == 1


def test_answer_that_is_no_completion_is_shown(serve, regenerate):
    url, _ = serve()
    status, _, said = regenerate(url, [[user("broken")]])
    assert status == 2
    assert "not a chat completion: b'{\"choices\": []}'" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--head", "x"), "--head is for our engine"),
        (("--adapter", "x"), "--adapter is for our engine"),
        (("--dtype", "float32"), "--dtype is for our engine"),
        (("--max-model-len", "9"), "--max-model-len is for our engine"),
    ],
)
def test_options_of_our_engine_are_refused(regenerate, tmp_path, more, message):
    status, _, said = regenerate("http://127.0.0.1:9", [[user("one")]], *more)
    assert (status, message in said) == (2, True)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h:8000", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/", "http://h:8000/v1/chat/completions"),
        ("https://h/v1/", "https://h/v1/chat/completions"),
        ("https://h/some/api", "https://h/some/api/chat/completions"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
    ],
)
def test_addresses(given, used):
    assert completions_url(given) == used


@pytest.mark.parametrize("given", ["localhost:8000", "ftp://h/v1", "http://", "http://me:secret@h/v1"])
def test_what_is_no_address_is_refused(given):
    with pytest.raises(ValueError, match="--endpoint") as refused:
        completions_url(given)
    assert "secret" not in str(refused.value)
