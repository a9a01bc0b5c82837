"""Prove what `headstart serve` promises, on a server of its own process: the same answers in any company, no leak, no unfair wait.

    python benchmarks/proofs/serving.py assets/stdlib-coder --head assets/stdlib-coder-medusa
    python benchmarks/proofs/serving.py assets/stdlib-coder --head assets/stdlib-coder-medusa --changes 400 --connections 100

Answers: requests with seeds and mixed parameters, first each alone through LLM without a head. Then they are asked for in random
order and company, while as many others leave at random moments: twice each with the head and without, with restarts between, by
SIGKILL and by SIGTERM. Changes: random changes of good requests, each answered with 200, 400 or 404. Connections: all open at once,
one request each, sent in order; a request is overtaken by those that were sent later and whose first token came before its own.
After each part nothing runs, waits or holds a page. The last line is JSON. Exits with 1 if anything is not as promised.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from headstart.benchmarks.serving.server_process import server_process
from headstart.evaluation.results import Report, command_line, decimals, plain
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams

SEATS = 16
APART = 0.002  # seconds between requests on many connections: those of one moment may pass each other
COLUMNS = {
    "part": ("part", 22, plain),
    "requests": ("requests", 8, plain),
    "left": ("left early", 10, plain),
    "tokens": ("tokens", 7, plain),
    "wrong": ("wrong", 5, plain),
    "seconds": ("seconds", 7, decimals(1)),
    "memory": ("MiB after", 9, decimals(0)),
}
TEXTS = [
    "Write the Python function `count_words`: Count the words of a text.",
    "def read_lines(path):\n",
    "import os\n\ndef join",
    "class Stack:\n    def push(self, item):\n",
]
PARAMETERS = [
    {},
    {"top_p": 0.9, "top_k": 40},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"stop": ["\n\n", "return"]},
    {"min_p": 0.05, "min_tokens": 5},
    {"logit_bias": {"70": 3}, "logprobs": 1},
]
MESSAGES = [{"role": "user", "content": "x"}]
# fmt: off
JUNK = [
    None, None, None, True, False, 0, -1, 1, 3, 10**30, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "auto", "\x00", "\ufffd", "é" * 50, [], [[]], [None], [1, "x"], ["x"], [0], [[1, 2], [3]], [[[]]], [MESSAGES],
    {}, {"x": 1}, {"1": 1}, [{}], {"type": "text"}, {"regex": "a*b"}, {"type": "json_object"}, {"json": {}}, {"choice": []},
]
FIELDS = [
    "model", "prompt", "messages", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids",
    "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "top_logprobs", "prompt_logprobs", "stream",
    "stream_options", "echo", "user", "tools", "tool_choice", "response_format", "structured_outputs", "best_of",
    "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "ignore_eos", "return_token_ids", "skip_special_tokens", "add_special_tokens", "max_completion_tokens",
    "include_stop_str_in_output", "return_tokens_as_token_ids", "cache_salt", "speculate", "return_speculation_tokens",
]
# fmt: on


def mixed_requests(count, texts=TEXTS):
    """Bodies with seeds and mixed parameters, each answered in the same way whenever it is asked for."""
    dice = random.Random(1)
    return [
        {
            "prompt": texts[seed % len(texts)] * (1 + seed % 3),
            "seed": seed,
            "temperature": dice.choice([0.0, 0.7, 1.0]),
            "max_tokens": dice.randrange(5, 25),
            **PARAMETERS[seed % len(PARAMETERS)],
        }
        for seed in range(count)
    ]


def changed_request(dice):
    """(path, body as bytes) of a good request with one or two fields of another value, cut and torn now and then."""
    path = dice.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"])
    body = {"prompt": "x"} if path != "/v1/chat/completions" else {"messages": MESSAGES}
    if path != "/tokenize":
        body |= {"max_tokens": 2, "seed": 1}
    for _ in range(dice.choice([1, 1, 2])):
        body[dice.choice(FIELDS)] = dice.choice(JUNK)
    if body.get("max_completion_tokens") is not None:
        body["max_completion_tokens"] = min(body["max_completion_tokens"], 3) if _is_number(body) else "x"
    text = json.dumps(body).encode()
    if dice.random() < 0.1:
        text = text[: dice.randrange(len(text))] + bytes([dice.randrange(256)]) + text[dice.randrange(len(text)) :]
    return path, text


def _is_number(body):
    return type(body["max_completion_tokens"]) in (int, float)


async def ask_all(url, order, bodies, leaving):
    """Ask in this order, [(number, whether it leaves)], with up to 40 open.  leaving: {number: pieces that one which leaves reads}

    -> {number: (text, token ids)} of those that do not leave
    """
    found, places = {}, asyncio.Semaphore(40)

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def ask(number, pieces):
            body = bodies[number] | {"return_token_ids": True}
            async with places:
                if pieces is not None:
                    endless = {"max_tokens": 500, "stream": True, "ignore_eos": True, "stop": None}
                    async with http.stream("POST", "/v1/completions", json=body | endless) as answer:
                        lines = answer.aiter_lines()
                        for _ in range(pieces):
                            await anext(lines)
                    return
                answer = await http.post("/v1/completions", json=body)
                answer.raise_for_status()
                choice = answer.json()["choices"][0]
                found[number] = choice["text"], choice["token_ids"]

        await asyncio.gather(*(ask(number, leaving[number] if leaves else None) for number, leaves in order))
    return found


async def order_of_first_tokens(url, count, seats):
    """Open so many connections, ask on each for a few tokens, in order.  -> places in the order of their first tokens"""
    host, port = re.fullmatch(r"http://(.*):(\d+)", url).groups()
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    arrived = []
    for number, (_, writer) in enumerate(opened):
        body = json.dumps({"prompt": "import os", "max_tokens": 8, "seed": number, "stream": True, "ignore_eos": True})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        await asyncio.sleep(APART)

    async def read(number, reader, writer):
        text = b""
        while b"data: " not in text:
            piece = await reader.read(4096)
            if not piece:
                raise RuntimeError(f"connection {number} was closed without an answer: {text[:200]!r}")
            text += piece
        arrived.append(number)
        while piece := await reader.read(65536):
            text += piece
        writer.close()
        if b"[DONE]" not in text:
            raise RuntimeError(f"the answer on connection {number} has no end")

    await asyncio.gather(*(read(number, *pair) for number, pair in enumerate(opened)))
    return arrived


def most_overtaken(arrived):
    """The most later ones that came before one."""
    return max(sum(later > number for later in arrived[:place]) for place, number in enumerate(arrived))


class Served:
    """A running `headstart serve`."""

    def __init__(self, process, url):
        self.process, self.url = process, url

    def figure(self, name):
        """The sum of a metric's values."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}(_total)?[{{ ]", line))

    def wait_until_idle(self, seconds=20):
        """Until nothing runs, waits or holds a page. RuntimeError if something is left."""
        end = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while any(left := {name: self.figure(name) for name in names}.values()):
            if time.monotonic() > end:
                raise RuntimeError(f"something is left: {left}")
            time.sleep(0.05)

    def memory(self):
        """MiB that its processes hold."""
        return sum(_resident(pid) for pid in [self.process.pid, *_children(self.process.pid)]) / 2**20

    def end(self, how):
        """Send a signal and wait.  -> exit status"""
        children = _children(self.process.pid)
        self.process.send_signal(how)
        status = self.process.wait(60)
        end = time.monotonic() + 20
        while any(map(_runs, children)):
            if time.monotonic() > end:
                raise RuntimeError("a process of the server has outlived it")
            time.sleep(0.05)
        return status


def _children(pid):
    try:
        direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return direct + [grandchild for child in direct for grandchild in _children(child)]


def _resident(pid):
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def serving(options, *more):
    """`headstart serve` of the options' model in a process of its own: Served."""
    words = [options.model, "--device", options.device, "--served-model-name", "model", *more]
    with server_process(words) as (url, process):
        yield Served(process, url)


class Proof:
    """options: of the command line; report: a Report"""

    def __init__(self, options, report):
        self.options, self.report = options, report
        self.head = ["--head", options.head, *(["--tree", options.tree] if options.tree else [])]
        self.broken = []

    def part(self, part, begun, server, **row):
        """Add a row; whatever is wrong in it breaks the promise."""
        server.wait_until_idle()
        seconds = time.perf_counter() - begun
        self.report.add({"part": part, "left": 0, **row, "seconds": seconds, "memory": server.memory()})
        if row["wrong"]:
            self.broken.append(part)

    def answers(self):
        count, dice = self.options.requests, random.Random(5)
        bodies = mixed_requests(count)
        llm = LLM(self.options.model, device=self.options.device, max_num_seqs=1, max_logprobs=20)
        alone = []
        for body in bodies:
            params = SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})
            output = llm.generate([body["prompt"]], params)[0].outputs[0]
            alone.append((output.text, output.token_ids))
        del llm
        for part, more in (("answers, plain", []), ("answers, head", self.head)):
            for how in (signal.SIGKILL, signal.SIGTERM):
                with serving(self.options, "--max-num-seqs", str(SEATS), *more) as server:
                    order = [(number, leaves) for number in range(count) for leaves in (False, True)]
                    dice.shuffle(order)
                    leaving, begun = {number: dice.randrange(1, 30) for number in range(count)}, time.perf_counter()
                    found = asyncio.run(ask_all(server.url, order, bodies, leaving))
                    wrong = sum(found.get(number) != alone[number] for number in range(count))
                    tokens = sum(len(ids) for _, ids in found.values())
                    self.part(part, begun, server, requests=count, left=count, tokens=tokens, wrong=wrong)
                    if server.end(how) != (0 if how == signal.SIGTERM else -how):
                        self.broken.append(f"exit after {how.name}")

    def changes(self):
        dice, count = random.Random(7), self.options.changes
        with (
            serving(self.options, "--max-num-seqs", str(SEATS), *self.head) as server,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            for part in ("changes, first half", "changes, second half"):
                begun, statuses = time.perf_counter(), {}
                for _ in range(count // 2):
                    path, text = changed_request(dice)
                    answer = http.post(path, content=text, headers={"Content-Type": "application/json"})
                    statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                wrong = sum(n for status, n in statuses.items() if status not in (200, 400, 404))
                self.part(part, begun, server, requests=count // 2, wrong=wrong, statuses=statuses)

    def connections(self):
        count, seats = self.options.connections, 64
        more = ["--max-num-seqs", str(seats), "--max-waiting", str(2 * count), *self.head]
        with serving(self.options, *more) as server:
            asyncio.run(order_of_first_tokens(server.url, seats, seats))
            begun = time.perf_counter()
            overtaken = most_overtaken(asyncio.run(order_of_first_tokens(server.url, count, seats)))
            # All requests of one step, and those that were read or tokenized at the same moment, may pass each other.
            wrong = int(overtaken > 2 * seats)
            self.part("connections", begun, server, requests=count, tokens=8 * count, wrong=wrong, overtaken=overtaken)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the target: a folder or Hub id, with a tokenizer")
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree", help="shape of the drafts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=200, help="whose answers are compared (default 200)")
    parser.add_argument("--changes", type=int, default=10_000, help="changed requests (default 10000)")
    parser.add_argument("--connections", type=int, default=1000, help="open at once (default 1000)")
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    command = command_line("benchmarks/proofs/serving.py", arguments)
    report = Report("serving", COLUMNS, device, command, vars(options), options.output)
    proof = Proof(options, report)
    for part in (proof.answers, proof.changes, proof.connections):
        part()
    report.state(f"not as promised: {', '.join(proof.broken) or 'nothing'}", broken=proof.broken)
    report.finish()
    return 1 if proof.broken else 0


if __name__ == "__main__":
    sys.exit(main())
