"""An open-loop load: requests arrive at times of their own, whether or not earlier ones have been answered.

    outcomes = asyncio.run(send(client, requests, Arrivals(rate=4.0, seed=0), max_concurrency=None, ended=bar.update))

Times of an Outcome are what a client sees: from before it connects. If --max-concurrency holds requests back, they count from the
moment they are sent, as in vLLM.
"""

import asyncio
import contextlib
import json
import math
import random
from dataclasses import dataclass, field
from time import perf_counter

from .client import HttpError


@dataclass(frozen=True)
class LoadRequest:
    """One request.  prompt: token ids, a text, or a list of messages; a server streams `max_tokens` tokens after it"""

    prompt: list | str
    max_tokens: int
    seed: int
    temperature: float

    @property
    def is_chat(self):
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)

    def body(self, model):
        """The route, and the body of the request. Token ids are asked for because a piece without text is not sent otherwise."""
        path, name = ("/v1/chat/completions", "messages") if self.is_chat else ("/v1/completions", "prompt")
        asked = {
            "model": model,
            name: self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "seed": self.seed,
        }
        options = {"temperature": self.temperature, "stream": True, "stream_options": {"include_usage": True}}
        options["return_token_ids"] = True
        return path, asked | options


@dataclass(frozen=True)
class Arrivals:
    """Poisson arrivals.  rate: requests per second, inf for all at once"""

    rate: float
    seed: int

    def times(self, count):
        """Seconds from the start to each arrival."""
        if math.isinf(self.rate):
            return [0.0] * count
        dice, now, found = random.Random(f"arrivals {self.seed}"), 0.0, []
        for _ in range(count):
            found.append(now)
            now += dice.expovariate(self.rate)
        return found


@dataclass
class Outcome:
    """What became of a request. Times in seconds; late: how much after its arrival it was sent, without --max-concurrency"""

    late: float = 0.0
    to_first: float | None = None  # from sending to the first piece
    total: float | None = None  # to the last piece
    gaps: list = field(default_factory=list)  # between pieces
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None

    @property
    def per_token(self):
        """Mean seconds per token after the first, None for a single one."""
        return (self.total - self.to_first) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def random_requests(vocab_size, seed, count, prompts, outputs, temperature):
    """LoadRequests of random tokens: lengths between the pairs `prompts` and `outputs`, both included. The same for a seed."""
    dice = random.Random(f"load {seed}")
    made = []
    for number in range(count):
        tokens = [dice.randrange(vocab_size) for _ in range(dice.randint(*prompts))]
        made.append(LoadRequest(tokens, dice.randint(*outputs), number, temperature))
    return made


def requests_of(entries, seed, outputs, temperature):
    """LoadRequests of the entries of a file of prompts (inference/prompt_files.py), with random lengths of outputs."""
    dice = random.Random(f"load {seed}")
    found = [entry.get("messages") or entry.get("prompt_token_ids") or entry["prompt"] for entry in entries]
    return [LoadRequest(prompt, dice.randint(*outputs), i, temperature) for i, prompt in enumerate(found)]


async def send(client, model, requests, arrivals, max_concurrency=None, ended=lambda: None):
    """Send LoadRequests as they arrive, and read all answers.  -> (Outcomes in order, seconds from the first to the last event)

    ended(): called after each request. A request that fails is an Outcome with an error; nothing is sent again.
    """
    room = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start, outcomes = perf_counter(), [Outcome() for _ in requests]

    async def answer(request, outcome, due):
        async with room:
            if max_concurrency is None:
                outcome.late = perf_counter() - start - due
            try:
                await _read(client, model, request, outcome)
            except (HttpError, OSError) as error:
                outcome.error = str(error) or type(error).__name__
            except json.JSONDecodeError:
                outcome.error = "an event of the stream is not JSON"
        ended()

    async with asyncio.TaskGroup() as running:
        for request, outcome, due in zip(requests, outcomes, arrivals.times(len(requests))):
            if (wait := start + due - perf_counter()) > 0:
                await asyncio.sleep(wait)
            running.create_task(answer(request, outcome, due))
    return outcomes, perf_counter() - start


async def _read(client, model, request, outcome):
    """Send one request, and fill in its Outcome. Raises HttpError and OSError."""
    began = last = perf_counter()
    usage = None
    async for events in client.events(*request.body(model)):
        now = perf_counter()
        for event in events:
            if event == b"[DONE]":
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                raise HttpError(chunk["error"].get("code"), event)
            usage = chunk.get("usage") or usage
            if not chunk.get("choices"):
                continue
            delta = chunk["choices"][0].get("delta") or {}
            if "role" in delta and not delta.get("content"):
                continue  # the beginning of a message, before its first token
            if outcome.to_first is None:
                outcome.to_first = now - began
            else:
                outcome.gaps.append(now - last)
            last = now
    if usage is None or outcome.to_first is None:
        raise ConnectionResetError("the stream ended without usage: the server must take stream_options.include_usage")
    outcome.total = last - began
    outcome.num_prompt_tokens, outcome.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
