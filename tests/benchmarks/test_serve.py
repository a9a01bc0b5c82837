"""`headstart bench serve`: what it sends, when, and what it makes of the answers. Servers are reached over sockets."""

import asyncio
import itertools
import json
import math
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from headstart.benchmarks.serving import load as load_module
from headstart.benchmarks.serving.client import Client
from headstart.benchmarks.serving.load import Arrivals, LoadRequest, random_requests, send
from headstart.benchmarks.serving.serve import Offline, _compare, percentiles
from headstart.cli import main
from headstart.commands.bench import serve as command
from headstart.tests.inference.server.serving import HEADS, PROMPTS, TARGET, running

SMALL = ["--num-prompts", "6", "--outputs", "3-9", "--num-warmups", "2", "--goodput", "ttft:60000,tpot:60000"]


@asynccontextmanager
async def scripted(answer):
    """The Client of a server on loopback that writes what answer(body, write) writes."""

    async def connected(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        await answer(body, writer.write)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/")


def event(content):
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


START = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
PIECE = event({"choices": [{"index": 0, "text": "x"}], "usage": None})


def usage(new):
    return event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": new}})


def load(answer, count, arrivals=None, **options):
    """The Outcomes of `count` requests for 3 tokens, and the seconds they took."""

    async def work():
        requests = [LoadRequest([number], 3, number, 0.0) for number in range(count)]
        async with scripted(answer) as client:
            return await send(client, "m", requests, arrivals or Arrivals(math.inf, 0), **options)

    return asyncio.run(work())


def test_times_are_those_between_the_pieces(monkeypatch):
    """By a clock that the server moves, so that a busy machine changes nothing."""
    clock = [5.0]
    monkeypatch.setattr(load_module, "perf_counter", lambda: clock[0])

    async def passes(seconds):
        await asyncio.sleep(0.01)
        for _ in range(20):  # the client reads what was written
            await asyncio.sleep(0)
        clock[0] += seconds

    async def answer(_, write):
        await passes(0.1)
        write(START + event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        await passes(0.1)
        for gap in (0.05, 0.15, 0.25):
            write(PIECE)
            await passes(gap)
        write(usage(9) + END)

    (outcome,), took = load(answer, 1)
    assert outcome.error is None
    assert outcome.to_first == pytest.approx(0.2)
    assert outcome.gaps == pytest.approx([0.05, 0.15])
    assert outcome.total == pytest.approx(0.4)  # up to the last piece
    assert took == pytest.approx(0.65)
    assert outcome.per_token == pytest.approx((outcome.total - outcome.to_first) / 8)
    assert (outcome.num_prompt_tokens, outcome.num_tokens) == (7, 9)


def test_what_goes_wrong_is_a_failure_with_its_reason():
    async def answer(body, write):
        bodies = {
            0: b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 33\r\n\r\n{"error": {"message": "no room"}}',
            1: START + PIECE,
            2: START + PIECE + event({"error": {"message": "broke", "code": "unavailable"}}) + END,
            3: START + PIECE + END,
            4: START + b"6\r\ndata: \r\n4\r\n{]\n\n\r\n" + END,
            5: b"",
            6: START + PIECE + usage(1) + END,
        }
        write(bodies[body["prompt"][0]])

    outcomes, _ = load(answer, 7)
    told = [outcome.error for outcome in outcomes]
    expected = [
        "429: no room",
        "within the answer",
        "unavailable: broke",
        "without usage",
        "not JSON",
        "before an answer",
    ]
    assert [words in error for words, error in zip(expected, told)] == [True] * 6, told
    assert (told[6], outcomes[6].gaps, outcomes[6].per_token) == (None, [], None)


def test_requests_arrive_by_themselves_and_wait_only_for_max_concurrency():
    running_now, most = 0, 0

    async def answer(_, write):
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.1)
        running_now -= 1
        write(START + PIECE + usage(1) + END)

    arrivals = Arrivals(rate=200.0, seed=1)
    outcomes, took = load(answer, 20, arrivals)
    assert most > 3  # nobody waits for an answer
    assert max(outcome.late for outcome in outcomes) < 0.2
    assert took >= arrivals.times(20)[-1] + 0.1
    most = 0
    load(answer, 8, max_concurrency=2)
    assert most == 2


def test_arrivals_are_those_of_a_poisson_process():
    times = Arrivals(rate=4.0, seed=0).times(4001)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / 4000
    assert mean == pytest.approx(0.25, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / 4000 == pytest.approx(mean**2, rel=0.1)
    assert times == Arrivals(4.0, 0).times(4001) != Arrivals(4.0, 1).times(4001)
    assert Arrivals(math.inf, 0).times(3) == [0, 0, 0]


def test_random_requests_keep_their_lengths_and_repeat():
    requests = random_requests(50, 0, 200, (3, 9), (2, 4), 0.0)
    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert {request.max_tokens for request in requests} == {2, 3, 4}
    assert {token for request in requests for token in request.prompt} == set(range(50))
    assert (
        requests == random_requests(50, 0, 200, (3, 9), (2, 4), 0.0) != random_requests(50, 1, 200, (3, 9), (2, 4), 0.0)
    )


def test_percentiles_are_nearest_ranks():
    assert percentiles(range(1, 201)) == {"p50": 100, "p90": 180, "p99": 198}
    assert percentiles([5]) == {"p50": 5, "p90": 5, "p99": 5}


def test_a_running_server_is_measured(speculative, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPTS[1]}, {"messages": [{"role": "user", "content": "x"}]}, {"prompt_token_ids": [1, 2]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with running(speculative(), api_keys=("secret",)) as server:
        for given, count in (
            (["--prompts", "5-40", "--vocab-size", "256", *SMALL], 6),
            (["--prompts", str(prompts)], 3),
        ):
            options = [
                "--base-url",
                server.url,
                "--api-key",
                "secret",
                "--output",
                str(tmp_path / "found.json"),
                *given,
            ]
            before = server.llm.engine.metrics.spec_decode.num_steps
            assert main(["bench", "serve", "--outputs", "3-9", *options]) == 0
            assert server.llm.engine.metrics.spec_decode.num_steps > before
            printed = capsys.readouterr()
            found = json.loads(printed.out.splitlines()[-1])
            assert found == json.loads((tmp_path / "found.json").read_text())
            assert "secret" not in json.dumps(found["settings"])
            row, *times = found["rows"]
            assert (row["completed"], row["failed"], found["facts"]["failures"]) == (count, 0, {})
            assert 3 * count <= row["output_tokens"] <= 9 * count
            assert row["requests_per_second"] == pytest.approx(count / row["seconds"], rel=1e-4)
            assert 1 <= row["tokens_per_step"] < 4
            assert row.get("goodput") == (row["requests_per_second"] if count == 6 else None)
            assert [time["time"] for time in times] == ["ttft", "itl", "tpot", "e2el"]
            assert times[0]["p50"] < times[3]["p50"]  # a piece comes before the whole
            assert all(0 < time["p50"] <= time["p90"] <= time["p99"] for time in times)
            assert f"{count}/{count}" in printed.err
        refused = ["--base-url", server.url, "--vocab-size", "256", "--api-key"]
        assert main(["bench", "serve", *refused, "wrong"]) == 2
        assert "give the server's key" in capsys.readouterr().err
        assert main(["bench", "serve", *refused, "secret"]) == 2
        assert "and the server's max_model_len is 2048" in capsys.readouterr().err


def test_a_server_is_started_with_the_same_options_as_the_engine_beside_it(monkeypatch, capfd):
    monkeypatch.setattr(command, "_in_a_child", command._offline)  # the child's work, without its start
    llm = ["--head", str(HEADS), "--tree", "static", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4"]
    assert main(["bench", "serve", str(TARGET), *llm, "--prompts", "5-40", *SMALL, "--offline"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    *without, served = rows = found["rows"][:4]
    assert [row["by"] for row in rows] == ["LLM.generate", "in order", "streams", "HTTP"]
    for name in ("completed", "prompt_tokens", "output_tokens", "tokens_per_step"):
        assert len({row[name] for row in rows}) == 1, name
    for row in without:
        cost = served["seconds"] / row["seconds"] - 1
        assert found["facts"]["http_cost"][row["by"]] == pytest.approx(cost, abs=1e-3)
    later = served["ttft_p50"] - without[-1]["ttft_p50"]
    assert found["facts"]["http_first_token_ms"] == pytest.approx(later, abs=1e-2)


def test_with_few_at_once_the_engine_beside_it_runs_streams_alone(capfd):
    few = ["--device", "cpu", "--prompts", "5-40", *SMALL, "--offline", "--max-concurrency", "1"]
    assert main(["bench", "serve", str(TARGET), *few]) == 0
    rows = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"][:2]
    assert [row["by"] for row in rows] == ["streams", "HTTP"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_no_more_requests_are_open_at_once_than_were_asked_for(is_stream):
    class Session:
        open, most, order = [], 0, []

        def submit(self, prompt, params, call):
            assert call.is_stream == is_stream
            self.order.append(prompt)
            self.open.append(one := SimpleNamespace(finished=False, prompt=prompt))
            self.most = max(self.most, len(self.open))
            return one

        def step(self):
            self.open.pop(0).finished = True

        def output(self, submission):
            return submission.prompt

    session = Session()
    prompts = list(range(7))
    llm = SimpleNamespace(session=session)
    assert command._run_in_order(llm, prompts, prompts, 3, is_stream) == prompts == session.order
    assert session.most == 3


def test_the_options_of_the_engine_are_handed_on():
    from headstart.cli import build_parser

    words = [
        "--enforce-eager",
        "--head=a b",
        "--max-num-seqs=1",
        "--no-enable-prefix-caching",
        "--num-speculative-tokens=1",
    ]
    parsed = build_parser().parse_args(["bench", "serve", "model", "--seed", "3", *words])
    assert sorted(command.llm_words(parsed)) == words
    assert command.llm_words(build_parser().parse_args(["bench", "serve", "model", "--max-num-seqs", "64"])) == []


@pytest.fixture
def nothing_starts(monkeypatch):
    """No server and no engine may be started."""
    monkeypatch.setattr("headstart.benchmarks.serving.server_process.subprocess.Popen", pytest.fail)
    monkeypatch.setattr(command, "_in_a_child", pytest.fail)


@pytest.mark.parametrize("more", [[], ["--offline"]])
def test_lengths_that_do_not_fit_are_told_before_anything_is_started(more, nothing_starts, capsys):
    given = ["bench", "serve", str(TARGET), "--num-prompts", "12", *more]
    assert main([*given, "--prompts", "2000", "--outputs", "64"]) == 2
    told = capsys.readouterr().err
    assert "have 2064 tokens, and the server's max_model_len is 2048: give shorter --prompts and --outputs" in told
    assert told.count("\n") == 1
    assert main([*given, "--max-model-len", "128", "--prompts", "100", "--outputs", "64"]) == 2
    assert "have 164 tokens, and the server's max_model_len is 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "outputs", "most", "expected"),
    [
        (None, None, None, ((100, 2000), (32, 512))),
        (None, None, 8192, ((100, 2000), (32, 512))),
        (None, None, 2048, ((100, 1536), (32, 512))),
        (None, None, 101, ((76, 76), (25, 25))),
        (None, None, 2, ((1, 1), (1, 1))),
        ((5, 2000), None, 2048, ((5, 2000), (32, 48))),
        (None, (8, 2000), 2048, ((48, 48), (8, 2000))),
        ((5, 4000), (8, 64), 2048, ((5, 4000), (8, 64))),
        ("file.jsonl", None, 2048, ("file.jsonl", (32, 512))),
        ("file.jsonl", None, 64, ("file.jsonl", (16, 16))),
    ],
)
def test_lengths_that_are_not_given_fit_into_the_model(prompts, outputs, most, expected):
    assert command.fitting(prompts, outputs, most) == expected


def test_the_header_says_what_is_sent(capsys, monkeypatch):
    monkeypatch.setattr(command, "_in_a_child", lambda *_: 1 / 0)
    own = str(TARGET / "heldout.jsonl")
    for words, sent, most in (
        ([], "256 requests: prompts of 100 to 1536 random tokens, outputs of 32 to 512", 2048),
        (["--max-model-len", "256"], "256 requests: prompts of 100 to 192 random tokens, outputs of 32 to 64", 256),
        (
            ["--prompts", own, "--num-prompts", "2", "--outputs", "16"],
            f"2 requests: prompts of {own}, outputs of 16",
            2048,
        ),
    ):
        with pytest.raises(ZeroDivisionError):
            main(["bench", "serve", str(TARGET), "--offline", *words])
        assert capsys.readouterr().out == f"{sent}, within the max_model_len of {most}\n"


@pytest.mark.parametrize(("first", "words"), [(0.5, "300.0 ms later"), (0.1, "100.0 ms earlier")])
def test_a_first_token_may_come_earlier_over_http(first, words):
    said = []
    report = SimpleNamespace(state=lambda text, **facts: said.append((text, facts)))
    without = [Offline("streams", 2.0, [], None, [0.2])]
    _compare(report, without, [SimpleNamespace(to_first=first, error=None)], 3.0)
    ((text, facts),) = said
    assert (
        text
        == f"over HTTP the same requests took 50.0% more time than by streams; a first token came {words} than by streams (p50)"
    )
    assert facts["http_first_token_ms"] == pytest.approx((first - 0.2) * 1e3)


def test_help_says_how_a_head_is_measured(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Random prompts accept few drafts" in told
    assert "--prompts assets/stdlib-coder/heldout.jsonl" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name what is measured"),
        (["--base-url", "localhost:1", "--prompts", "5", "--vocab-size", "9"], "must be like http://127.0.0.1:8000"),
        (["--base-url", "http://127.0.0.1:9", "--prompts", "5-9"], "give --vocab-size"),
        (
            ["--base-url", "http://127.0.0.1:9", "--prompts", "5", "--vocab-size", "9"],
            "no server of OpenAI's API answers",
        ),
        (["--base-url", "http://127.0.0.1:9", "--offline"], "--offline is for a server that is started"),
        (["--base-url", "http://127.0.0.1:9", "--head", "x"], "--head=x is for a server that is started"),
        (["x", "--offline", "--request-rate", "3"], "--offline does not wait for arrivals"),
        (["x", "--request-rate", "0"], "--request-rate must be above 0"),
        (["x", "--request-rate", "nan"], "--request-rate must be above 0"),
        (["x", "--prompts", "missing.jsonl"], "no prompt file missing.jsonl"),
        (["x", "--vocab-size", "9", "--outputs", "9-3"], "--outputs takes lengths in tokens"),
        (["x", "--vocab-size", "9", "--goodput", "ttft:1,p50:2"], "got 'p50:2'"),
        (["x", "--vocab-size", "9", "--goodput", "ttft"], "--goodput takes limits in ms"),
        (["x", "--vocab-size", "9", "--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["x", "--vocab-size", "9", "--max-concurrency", "0"], "--max-concurrency must be at least 1"),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert main(["bench", "serve", *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
