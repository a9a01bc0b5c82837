"""`headstart bench serve`: load on a server of OpenAI's API, and what its clients see.

Times are those of streams, in milliseconds: `ttft` from sending a request to its first piece; `itl` from one piece to the next, and
a piece may hold several tokens where the server speculates; `tpot`, a request's mean per token after the first; `e2el` to its last
piece. Percentiles are nearest ranks. Goodput is the number of requests per second whose own times keep all limits. Acceptance is
the difference of the server's own counters, where /metrics has vLLM's `spec_decode` names.

The client has one thread. `client` is its share of one core; near 1 the figures are the client's. It is also told how much later
than their arrival requests were sent.

*Offline*: the same requests at once, in a process of its own that ends before the server starts, in three ways. `LLM.generate`
knows how long all outputs may be, and starts the last requests with the longest. `in order` starts them as they come, which is what
a server can do. So do `streams`; beside them the engine also computes prompts more slowly, so that nobody waits long for the next
token. What is left between streams and HTTP is what the server costs.
"""

import asyncio
import json
import math
import time
from dataclasses import dataclass

from tqdm import tqdm

from ...evaluation.results import Report, decimals, plain
from ...inference.frozen_heap import frozen_heap
from ...inference.server.door.unix_socket import allow_open_files
from .client import Client, HttpError
from .load import Arrivals, random_requests, requests_of, send

THROUGHPUT = {
    "by": ("by", 12, plain),
    "completed": ("completed", 9, plain),
    "failed": ("failed", 6, plain),
    "seconds": ("seconds", 8, decimals(2)),
    "requests_per_second": ("requests/s", 10, decimals(2)),
    "output_tokens_per_second": ("output tokens/s", 15, decimals(0)),
    "total_tokens_per_second": ("all tokens/s", 12, decimals(0)),
    "goodput": ("goodput/s", 9, decimals(2)),
    "tokens_per_step": ("tokens/step", 11, decimals(2)),
    "ttft_p50": ("ttft p50", 8, decimals(1)),
    "client": ("client", 6, decimals(2)),
}
TIMES = {
    "time": ("time", 12, plain),
    **{name: (f"{name} ms", 10, decimals(2)) for name in ("mean", "p50", "p90", "p99")},
}
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
BUSY = 0.8  # share of a core from which the client is said to be busy


@dataclass(frozen=True)
class ServeSettings:
    """Settings of `bench serve`; see `headstart bench serve --help`."""

    model: str | None = None  # the target
    base_url: str | None = None  # None: a server is started
    served_model_name: str | None = None  # None: the first one that the server names
    request_rate: float = math.inf
    max_concurrency: int | None = None
    num_prompts: int = 256
    prompts: tuple[int, int] | str = (100, 2000)  # shortest and longest; or a file
    outputs: tuple[int, int] = (32, 512)
    temperature: float = 0.0
    seed: int = 0
    num_warmups: int = 8
    goodput: tuple[tuple[str, float], ...] = ()  # (time, ms)
    offline: bool = False


@dataclass(frozen=True)
class Served:
    """A server that answers: its client, the name that requests give, and the longest prompt + output, None if it does not say."""

    client: Client
    model: str
    max_model_len: int | None


@dataclass(frozen=True)
class Offline:
    """What requests took without HTTP."""

    by: str
    seconds: float
    lengths: list  # (prompt tokens, output tokens) of each
    tokens_per_step: float | None
    firsts: list  # seconds from handing in a prompt to its first token


def bench_serve(settings, entries, vocab_size, *, server, max_model_len=None, offline=None, api_key=None, **report):
    """Measure, print both tables and the JSON object, which is returned.

    entries: of a file of prompts, None for random ones below vocab_size; server: a context of (base URL, what runs it);
    max_model_len: of a server that is to be started, None if it is not known; offline: a function from (warm-up, requests) to
    [Offline]; report: arguments of Report. Raises ValueError, before anything is started, for requests above max_model_len.
    """
    if entries is None:
        sizes = settings.num_prompts, settings.prompts, settings.outputs, settings.temperature
        requests = random_requests(vocab_size, settings.seed, *sizes)
        warm = random_requests(vocab_size, f"warm-up {settings.seed}", settings.num_warmups, *sizes[1:])
    else:
        requests = requests_of(entries, settings.seed, settings.outputs, settings.temperature)
        warm = requests[: settings.num_warmups]
    _check_lengths(requests, max_model_len)
    said = {name: value for name, value in vars(settings).items() if value is not None}
    said["request_rate"] = str(settings.request_rate)  # JSON has no infinity
    report = Report("serve", THROUGHPUT, settings=said, **report)
    report.note(_header(settings, max_model_len))
    allow_open_files()
    without = offline(warm, requests) if offline is not None else []
    for one in without:
        report.add(_throughput(one.by, one.seconds, one.lengths, one.tokens_per_step, one.firsts))
    with server as (base_url, _), asyncio.Runner() as runner:
        client = Client(base_url, api_key)
        served = runner.run(_look(client, settings))
        _check_lengths(requests, served.max_model_len)
        if warm:
            outcomes, _ = runner.run(_send(served, warm, settings, Arrivals(math.inf, 0), "warming up"))
            if all(one.error for one in outcomes):
                raise ValueError(f"no request of the warm-up was answered: {outcomes[0].error}")
        before, cpu = runner.run(_counters(client)), time.process_time()
        arrivals = Arrivals(settings.request_rate, settings.seed)
        with frozen_heap():
            outcomes, took = runner.run(_send(served, requests, settings, arrivals, "serving"))
        cpu = (time.process_time() - cpu) / took
        after = runner.run(_counters(client))
    _tell(report, settings, outcomes, took, _tokens_per_step(before, after), cpu)
    if without:
        _compare(report, without, outcomes, took)
    return report.finish()


def _header(settings, max_model_len):
    """What is sent, in a line."""
    prompts, outputs = settings.prompts, " to ".join(map(str, dict.fromkeys(settings.outputs)))
    if not isinstance(prompts, str):
        prompts = f"{' to '.join(map(str, dict.fromkeys(prompts)))} random tokens"
    limit = f", within the max_model_len of {max_model_len}" if max_model_len else ""
    return f"{settings.num_prompts} requests: prompts of {prompts}, outputs of {outputs}{limit}"


# --- the server ---


async def _look(client, settings):
    """Ask what is served.  -> Served"""
    try:
        models = json.loads(await client.ask("GET", "/v1/models"))["data"]
        names = [model["id"] for model in models]
        chosen = models[names.index(settings.served_model_name) if settings.served_model_name else 0]
    except (OSError, HttpError, KeyError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"no server of OpenAI's API answers at {client.host} port {client.port}: {error}") from None
    except ValueError:
        raise ValueError(
            f"--served-model-name {settings.served_model_name}: the server has {', '.join(names)}"
        ) from None
    return Served(client, chosen["id"], chosen.get("max_model_len"))


def _check_lengths(requests, most):
    """ValueError if the server would refuse prompts of token ids for their length."""
    known = [request for request in requests if not request.is_chat and isinstance(request.prompt, list)]
    longest = max((len(request.prompt) + request.max_tokens for request in known), default=0)
    if most is not None and longest > most:
        raise ValueError(
            f"a prompt and its output have {longest} tokens, and the server's max_model_len is {most}: give shorter "
            "--prompts and --outputs"
        )


async def _send(served, requests, settings, arrivals, what):
    with tqdm(total=len(requests), desc=what, unit="request", dynamic_ncols=True) as bar:
        return await send(served.client, served.model, requests, arrivals, settings.max_concurrency, bar.update)


async def _counters(client):
    """{name: value} of COUNTERS at /metrics, over all labels; empty where the server has none."""
    try:
        page = (await client.ask("GET", "/metrics")).decode()
    except (HttpError, OSError, UnicodeDecodeError):
        return {}
    found = {}
    for line in page.splitlines():
        name = line.partition("{")[0].removesuffix("_total")
        if name in COUNTERS:
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def _tokens_per_step(before, after):
    """The acceptance length between two readings, None if nothing was drafted."""
    drafts, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTERS)
    return 1 + accepted / drafts if drafts else None


# --- what was measured ---


def _tell(report, settings, outcomes, seconds, tokens_per_step, client):
    """Both tables of the load, and what went wrong. ValueError if nothing was answered."""
    done = [one for one in outcomes if one.error is None]
    if not done:
        raise ValueError(f"no request was answered: {outcomes[0].error}")
    lengths = [(one.num_prompt_tokens, one.num_tokens) for one in done]
    row = _throughput("HTTP", seconds, lengths, tokens_per_step, [one.to_first for one in done])
    row |= {"failed": len(outcomes) - len(done), "client": client}
    if settings.goodput:
        row["goodput"] = sum(map(_keeps(settings.goodput), done)) / seconds
    report.add(row)
    report.note("")
    report.table(TIMES)
    for name, values in _times(done).items():
        if values:
            report.add({"time": name, "mean": sum(values) / len(values), **percentiles(values)})
    report.note("")
    reasons = [one.error for one in outcomes if one.error is not None]
    for reason in sorted(set(reasons)):
        report.note(f"{reasons.count(reason)} failed: {reason}")
    if client > BUSY:
        report.note(f"the client took {client:.0%} of one core: these may be figures of the client")
    late = {name: round(ms, 3) for name, ms in percentiles([one.late * 1e3 for one in outcomes]).items()}
    report.state(
        f"requests were sent {late['p50']:.1f} ms after their arrival (p50), {late['p99']:.1f} ms (p99)",
        late_ms=late,
        failures={reason: reasons.count(reason) for reason in sorted(set(reasons))},
    )


def _compare(report, without, outcomes, seconds):
    """Say what HTTP cost beside each Offline."""
    costs = {one.by: round(seconds / one.seconds - 1, 5) for one in without}
    words = [f"{abs(cost):.1%} {'more' if cost >= 0 else 'less'} time than by {by}" for by, cost in costs.items()]
    first = percentiles([one.to_first * 1e3 for one in outcomes if one.error is None])["p50"]
    later = round(first - percentiles([one * 1e3 for one in without[-1].firsts])["p50"], 3)
    report.state(
        f"over HTTP the same requests took {', '.join(words)}; a first token came {abs(later):.1f} ms "
        f"{'later' if later >= 0 else 'earlier'} than by {without[-1].by} (p50)",
        http_cost=costs,
        http_first_token_ms=later,
    )


def _throughput(by, seconds, lengths, tokens_per_step, firsts):
    """The row of one way to run the requests.  lengths: (prompt, output) tokens of each; firsts: seconds to the first tokens"""
    num_prompt, num_new = map(sum, zip(*lengths))
    return {
        "by": by,
        "completed": len(lengths),
        "failed": 0,
        "seconds": seconds,
        "requests_per_second": len(lengths) / seconds,
        "output_tokens_per_second": num_new / seconds,
        "total_tokens_per_second": (num_prompt + num_new) / seconds,
        "tokens_per_step": tokens_per_step,
        "ttft_p50": percentiles([one * 1e3 for one in firsts])["p50"],
        "prompt_tokens": num_prompt,
        "output_tokens": num_new,
    }


def _times(outcomes):
    """{name: milliseconds} of the answered requests."""
    return {
        "ttft": [one.to_first * 1e3 for one in outcomes],
        "itl": [gap * 1e3 for one in outcomes for gap in one.gaps],
        "tpot": [one.per_token * 1e3 for one in outcomes if one.per_token is not None],
        "e2el": [one.total * 1e3 for one in outcomes],
    }


def _keeps(limits):
    """A function that tells whether all times of an Outcome are within the limits."""

    def keeps(outcome):
        times = _times([outcome])
        return all(max(times[name], default=0.0) <= most for name, most in limits)

    return keeps


def percentiles(values):
    """{"p50", "p90", "p99"}: nearest ranks."""
    ordered = sorted(values)
    return {f"p{percent}": ordered[-(-percent * len(ordered) // 100) - 1] for percent in (50, 90, 99)}
