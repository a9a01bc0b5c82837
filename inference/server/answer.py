"""What the answers of both ways to ask for text have in common: names, usage, counts of drafts, and how a job becomes a response.

An answer is told whole, or as chunks of server-sent events. Its kind (completions.py, chat.py) says what a choice looks like.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from ..engine.metrics import SpecDecodeMetrics
from .connection import ClientLeft, EventStream, unless_client_leaves
from .driver.job import Broken, Full
from .errors import FAILED, ApiError, json_bytes, json_response
from .figures import speculation_metrics

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
log = logging.getLogger("headstart.server")


@dataclass
class Counts:
    """Tokens and drafts of an answer so far."""

    prompt: int
    completion: int = 0
    cached: int = 0
    drafts: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    broken: bool = False  # whether a stream ended with an error


class Answer:
    """One answer. Subclasses: KIND, CHUNK, PREFIX; `choice(delta)`, `start()` and `chunk(delta)`.

    service: Service (service.py); fields: SamplingFields; prompts: CheckedPrompts; name: of the request
    """

    def __init__(self, service, fields, prompts, name):
        self.service, self.fields, self.prompts = service, fields, prompts
        self.n = prompts[0].params.n
        self.asks_ids, self.as_ids = bool(fields.return_token_ids), bool(fields.return_tokens_as_token_ids)
        self.counts = Counts(sum(len(prompt.token_ids) for prompt in prompts))
        self._head = {
            "id": f"{self.PREFIX}-{name}",
            "object": None,
            "created": int(time.time()),
            "model": fields.model or service.names[0],
            "system_fingerprint": service.fingerprint,
        }

    def index(self, delta):
        """The number of a delta's choice."""
        return delta.prompt * self.n + delta.sample

    # --- what was counted ---

    def count(self, delta):
        if delta.finish_reason == "error":  # its grammar, tried before, went beyond the limits on the way
            raise ApiError(400, f"the answer's form cannot be followed further: {delta.stop_reason}")
        self.counts.completion += len(delta.token_ids)
        if delta.finish_reason is not None:
            if delta.sample == 0:
                self.counts.cached += delta.num_cached_tokens
            drafts, total = delta.drafts, self.counts.drafts
            for name in ("num_steps", "num_draft_tokens", "num_draft_depths", "num_accepted_tokens"):
                setattr(total, name, getattr(total, name) + getattr(drafts, name))
            longest = max(len(drafts.accepted_per_position), len(total.accepted_per_position))
            padded = [
                (one + [0] * longest)[:longest] for one in (drafts.accepted_per_position, total.accepted_per_position)
            ]
            total.accepted_per_position = [a + b for a, b in zip(*padded)]

    def usage(self):
        counts = self.counts
        told = {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.completion,
            "total_tokens": counts.prompt + counts.completion,
        }
        if self.service.options.prompt_tokens_details:
            told["prompt_tokens_details"] = {"cached_tokens": counts.cached}
        return told

    def metrics(self):
        """{"metrics": ...} of an answer that has ended, if it was asked for."""
        if not self.fields.return_speculation_metrics:
            return {}
        return {"metrics": {"speculative_decoding": speculation_metrics(self.counts.drafts, self.service.tree)}}

    def speculation(self, delta):
        """{"speculation": ...} of a chunk's choice, if it was asked for: its tokens, and whether each was an accepted draft."""
        if not self.fields.return_speculation_tokens:
            return {}
        texts = [self.service.texts.of(token, self.as_ids) for token in delta.token_ids]
        accepted = set(delta.accepted_drafts)
        return {"speculation": [{"token": text, "accepted": i in accepted} for i, text in enumerate(texts)]}

    # --- whole ---

    async def respond(self, receive, deadline):
        """The response: whole, or a stream of events. Raises ApiError before anything is sent, and ClientLeft.

        deadline: in the event loop's time, None: none
        """
        opening = self.service.client.open(self.prompts, bool(self.fields.stream), deadline)
        try:
            job = await unless_client_leaves(receive, opening)
        except TimeoutError:
            raise too_late(self.service.options) from None
        except Full as error:
            raise ApiError(429, str(error), code="too_many_requests", headers={"Retry-After": "1"}) from None
        except Broken as error:
            raise ApiError(503, str(error), code="unavailable") from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        options, close = self.service.options, lambda: self.service.client.close(job)
        if self.fields.stream:
            return EventStream(self._events(job), options.write_timeout, close)
        try:
            return json_response(await unless_client_leaves(receive, self._whole(job)))
        except Broken as error:
            raise ApiError(503, str(error), code="unavailable") from None
        except TimeoutError:
            raise too_late(self.service.options) from None
        finally:
            close()

    async def _whole(self, job):
        deltas = [delta async for batch in job.batches() for delta in batch]
        deltas.sort(key=self.index)
        for delta in deltas:
            self.count(delta)
        choices = [self.choice(delta) for delta in deltas]
        return {
            **self._head,
            "object": self.KIND,
            **self.whole_fields(deltas),
            "choices": choices,
            "usage": self.usage(),
            **self.metrics(),
        }

    def whole_fields(self, deltas):
        """Further fields of a whole answer."""
        return {}

    # --- streamed ---

    async def _events(self, job):
        """The stream of events, as bytes; what comes of one step is sent at once."""
        options = self.fields.stream_options
        with_usage = bool(options and options.include_usage)
        always = bool(options and options.continuous_usage_stats)

        def event(choices, **more):
            chunk = {**self._head, "object": self.CHUNK, "choices": choices, **more}
            if with_usage or always:
                chunk.setdefault("usage", self.usage() if always else None)
            return b"data: " + json_bytes(chunk) + b"\n\n"

        try:
            if start := self.start():
                yield b"".join(event([choice], **more) for choice, more in start)
            num_open = len(self.prompts) * self.n
            async for batch in job.batches(idle=self.service.options.keep_alive):
                pieces = []
                for delta in batch:
                    self.count(delta)
                    num_open -= delta.finish_reason is not None
                    choice, more = self.chunk(delta)
                    # The last chunk is the one with usage, or else that of the last finish_reason.
                    last = {} if num_open or with_usage else self.metrics()
                    if choice is not None:
                        pieces.append(event([choice], **more, **last))
                if pieces or not batch:
                    yield b"".join(pieces) or KEEP_ALIVE
            if with_usage:
                yield event([], usage=self.usage(), **self.metrics())
        except (asyncio.CancelledError, GeneratorExit, ClientLeft):
            raise
        except Exception as error:
            self.counts.broken = True
            yield b"data: " + json_bytes(self._told_as(error).content) + b"\n\n"
        yield DONE

    def start(self):
        """[(choice, further fields)] of the chunks before the first token."""
        return []

    def _told_as(self, error):
        """The ApiError that tells a client why its stream ended."""
        if isinstance(error, Broken):
            return ApiError(503, str(error), code="unavailable")
        if isinstance(error, TimeoutError):
            return too_late(self.service.options)
        if isinstance(error, ApiError):
            return error
        log.error("a stream failed: %s", type(error).__name__)
        return ApiError(500, FAILED)


def too_late(options):
    """The ApiError of a request that takes longer than ServerOptions let it."""
    return ApiError(
        504, f"the answer took more than {options.request_timeout:g} seconds (--request-timeout)", code="timeout"
    )
