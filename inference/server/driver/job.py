"""A job on the HTTP side: the work of one request, whose news are awaited."""

import asyncio
from dataclasses import dataclass


class Full(Exception):
    """As many outputs run and wait as may."""


class Broken(Exception):
    """The engine has failed, or the server ends."""


@dataclass(frozen=True)
class Failed:
    """The engine, or this job in it, broke off: nothing more comes."""

    reason: str


class Job:
    """outputs: {(prompt, sample): GrowingOutput}; deadline: in the event loop's time, None: none"""

    def __init__(self, number, outputs, deadline=None):
        self.number, self.outputs = number, outputs
        self.num_running = len(outputs)  # outputs that have not ended in the engine
        self.deadline, self.submitted = deadline, False
        self.limit = None  # the asyncio.Timeout of its submission, once it waits for that
        self._num_open = len(outputs)  # outputs whose end was not taken
        self._events, self._news = [], asyncio.Event()

    def put(self, event):
        self._events.append(event)
        self._news.set()

    async def take(self, idle=None):
        """The events that have come; none after `idle` seconds without one. Raises Broken, and TimeoutError at the deadline."""
        now = asyncio.get_running_loop().time
        if self.deadline is not None and now() >= self.deadline:
            raise TimeoutError
        if not self._news.is_set():
            ends = [end for end in (self.deadline, idle and now() + idle) if end is not None]
            try:
                async with asyncio.timeout_at(min(ends, default=None)):
                    await self._news.wait()
            except TimeoutError:
                if self.deadline is not None and now() >= self.deadline:
                    raise
                return []
        self._news.clear()
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, Failed):
                raise Broken(event.reason)
        return events

    async def batches(self, idle=None):
        """Lists of Deltas until all outputs have ended; an empty one after `idle` seconds without news."""
        while self._num_open:
            events = await self.take(idle)
            self._num_open -= sum(event.finish_reason is not None for event in events)
            yield events
