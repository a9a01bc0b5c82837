"""The server and its engine as two processes: equal bits, signals, and each of them killed in the middle of streams."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.commands.serve import build_llm
from headstart.inference.server.driver.engine_process import EngineEnded, EngineProcess
from headstart.tests.inference.server.serving import HEADS, LONG, PROMPTS, TARGET, serving

DONE = "data: [DONE]"
PATH = "/v1/completions"


def children(pid):
    """Engines among the child processes of a process."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def lives(pid):
    """Whether a process has not ended. Without its parent it may stay a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"


def wait_until_gone(pid, seconds=10):
    end = time.monotonic() + seconds
    while lives(pid):
        assert time.monotonic() < end, f"process {pid} lives on"
        time.sleep(0.02)


def reading(url, collected, **more):
    """Read a stream in a thread into the list.  -> the thread, once the first event has come"""
    came = threading.Event()

    def read():
        with httpx.stream("POST", f"{url}{PATH}", json=LONG | {"stream": True, **more}, timeout=30) as answer:
            for line in answer.iter_lines():
                collected.append(line)
                came.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert came.wait(20)
    return thread


class Process:
    """`headstart serve`, in a group of processes of its own."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "headstart.serve", str(TARGET), "--head", str(HEADS), "--port", "0"]
        command += ["--dtype", "float32", "--device", "cpu", "--uvicorn_log_level", "warning", *options]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.popen = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
        self.line = self.url = self.engine = None

    def wait(self):
        """Until it is ready."""
        self.line = self.popen.stdout.readline()
        found = re.search(r"ready: (http://127\.0\.0\.1:\d+)/v1 ", self.line)
        assert found, self.popen.communicate()[1]
        self.url = found[1]
        (self.engine,) = children(self.popen.pid)

    def signal_all(self, number):
        """As a terminal does for Ctrl-C."""
        os.killpg(self.popen.pid, number)


@pytest.fixture(scope="module")
def processes():
    given = [("--shutdown-timeout", "20"), ("--shutdown-timeout", "20"), ("--max-num-seqs", "1")]
    found = [Process(*options) for options in given]
    try:
        for process in found:
            process.wait()
        yield found
    finally:
        for process in found:
            process.popen.kill()
            process.popen.communicate()


def test_the_answers_of_the_process_are_those_of_llm(processes, plain_llm):
    url, params = processes[0].url, dict(temperature=0.9, max_tokens=24)
    stops = [[], ["\n"], ["return", "def "]]
    for seed, stop in enumerate(stops):
        own = plain_llm.generate([PROMPTS[seed]], SamplingParams(seed=seed, stop=stop, logprobs=2, **params))[
            0
        ].outputs[0]
        body = {"prompt": PROMPTS[seed], "seed": seed, "stop": stop, "logprobs": 2, "return_token_ids": True, **params}
        choice = httpx.post(f"{url}{PATH}", json=body, timeout=30).json()["choices"][0]
        assert (choice["text"], choice["token_ids"]) == (own.text, own.token_ids)
        assert choice["finish_reason"] == own.finish_reason
        told = choice["logprobs"]["token_logprobs"]
        assert told == [entry[token].logprob for entry, token in zip(own.logprobs, own.token_ids)]


def test_sigterm_lets_requests_end(processes):
    process = processes[0]
    assert "medusa" in process.line
    assert "changes no bit" in process.line
    lines = []
    reader = reading(process.url, lines, max_tokens=100)
    process.signal_all(signal.SIGTERM)
    reader.join(20)
    assert lines[-2] == DONE
    assert '"finish_reason":"length"' in lines[-4]
    assert process.popen.wait(20) == 0
    assert not lives(process.engine)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{process.url}/health")


def test_a_second_signal_aborts_requests(processes):
    process, lines = processes[1], []
    reader = reading(process.url, lines)
    start = time.monotonic()
    process.signal_all(signal.SIGINT)
    time.sleep(0.3)
    process.signal_all(signal.SIGINT)
    reader.join(10)
    assert "shutting down" in lines[-4]
    assert lines[-2] == DONE
    assert process.popen.wait(10) == 0
    assert time.monotonic() - start < 10
    assert not lives(process.engine)
    assert process.popen.stderr.read() == ""


def test_when_the_engine_is_killed_every_request_is_told(processes):
    """One streams, one waits for its seat."""
    process, lines, waiting = processes[2], [], []
    reader = reading(process.url, lines)
    whole = threading.Thread(target=lambda: waiting.append(httpx.post(f"{process.url}{PATH}", json=LONG, timeout=30)))
    whole.start()
    end = time.monotonic() + 10
    while not re.search(
        r"^vllm:num_requests_waiting\{.*\} 1.0$", httpx.get(f"{process.url}/metrics").text, re.MULTILINE
    ):
        assert time.monotonic() < end, "the second request never came"
        time.sleep(0.02)
    os.kill(process.engine, signal.SIGKILL)
    killed = time.monotonic()
    reader.join(10)
    whole.join(10)
    assert time.monotonic() - killed < 3
    assert '"type":"server_error"' in lines[-4]
    assert lines[-2] == DONE
    assert waiting[0].status_code == 503
    for answer in (httpx.get(f"{process.url}/health"), httpx.post(f"{process.url}{PATH}", json=LONG)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    told = httpx.get(f"{process.url}/metrics").text
    assert re.search(r'^vllm:request_success_total{.*"error".*} 2.0$', told, re.MULTILINE)
    assert re.findall(r"^vllm:num_requests_(?:running|waiting){.*} (.*)$", told, re.MULTILINE) == ["0.0", "0.0"]
    process.popen.terminate()
    assert process.popen.wait(10) == 1
    assert "was ended by SIGKILL" in process.popen.stderr.read()


def test_a_step_that_never_returns_is_given_up():
    """A stopped process stands for it. One that is stopped without work is left alone."""
    given = {"model": str(TARGET), "dtype": "float32", "device": "cpu", "trust_remote_code": False}
    with EngineProcess(partial(build_llm, given)) as engine:
        engine.wait_until_built()
        with serving(engine, None, step_timeout=1.5) as (service, _, _, url):
            pid, body = engine._process.pid, LONG | {"prompt": [5, 6, 7]}
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2.2)
            assert httpx.get(f"{url}/health").status_code == 200
            os.kill(pid, signal.SIGCONT)
            lines = []
            reader = reading(url, lines, **body, return_token_ids=True)
            os.kill(pid, signal.SIGSTOP)
            reader.join(10)
            assert "took more than 1.5 seconds (--step-timeout)" in lines[-4]
            assert lines[-2] == DONE
            assert httpx.get(f"{url}/health").status_code == 503
            assert "--step-timeout" in service.client.failure
        engine.wait(5)
        assert engine.exit_status == -signal.SIGKILL


def test_an_engine_does_not_outlive_its_server_and_hears_no_signal():
    """Killed while it is built, which is like a long step: nothing is read."""
    code = (
        "import time; from functools import partial; from headstart.inference.server.driver.engine_process import EngineProcess\n"
        "if __name__ == '__main__':\n"
        "    with EngineProcess(partial(time.sleep, 60)) as engine:\n"
        "        print(engine._process.pid, flush=True)\n"
        "        engine.wait_until_built()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        engine = int(server.stdout.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine, number)
        time.sleep(1)
        assert lives(engine)
        server.kill()
        wait_until_gone(engine)


@pytest.mark.parametrize(("work", "words"), [(os.abort, "SIGABRT"), (partial(os._exit, 7), "status 7")])
def test_a_process_that_ends_before_its_engine_is_built_says_how(work, words):
    with EngineProcess(work) as engine, pytest.raises(EngineEnded, match=words):
        engine.wait_until_built()


def test_two_ranks_serve_the_answers_of_one_and_end_together(target_llm_of_ranges):
    process = Process("-tp", "2", "--tensor-parallel-invariant", "2", "--tree", "static")
    try:
        process.wait()
        assert " on 2 ranks; " in process.line
        params = dict(temperature=0.9, max_tokens=16)
        own = target_llm_of_ranges.generate([PROMPTS[0]], SamplingParams(seed=1, logprobs=1, **params))[0].outputs[0]
        body = {"prompt": PROMPTS[0], "seed": 1, "logprobs": 1, "return_token_ids": True, **params}
        choice = httpx.post(f"{process.url}{PATH}", json=body, timeout=30).json()["choices"][0]
        assert choice["token_ids"] == own.token_ids
        told = choice["logprobs"]["token_logprobs"]
        assert told == [entry[token].logprob for entry, token in zip(own.logprobs, own.token_ids)]
        (rank,) = map(int, Path(f"/proc/{process.engine}/task/{process.engine}/children").read_text().split())
        os.kill(rank, signal.SIGKILL)  # while nothing runs
        wait_until_gone(process.engine)
        wait_until_gone(rank)
        answer = httpx.post(f"{process.url}{PATH}", json=body)
        assert answer.status_code == httpx.get(f"{process.url}/health").status_code == 503
        process.popen.terminate()
        assert process.popen.wait(10) == 1
        told = process.popen.stderr.read()
        assert told.count("rank 1 of 2 was ended by SIGKILL, and the other ranks with it") == 1
        assert "Traceback" not in told
    finally:
        process.popen.kill()
        process.popen.communicate()


@pytest.fixture
def target_llm_of_ranges():
    """The target in one process, with the sums of two ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as OMP_NUM_THREADS says for a Process
    yield LLM(str(TARGET), dtype="float32", device="cpu", tensor_parallel_invariant=2)
    torch.set_num_threads(before)
