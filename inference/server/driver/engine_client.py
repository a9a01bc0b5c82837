"""The asyncio side of the engine's thread: jobs whose events are awaited, and a limit to those that wait.

    job = await client.open(checked_prompts, streamed=True)    # Full, Broken or ValueError instead
    try:
        async for events in job.batches(): ...                 # Broken if the engine fails
    finally:
        client.close(job)                                      # cancels what has not ended

All methods are called in the event loop, except `check`. A slow reader fills its own job's list only, which its max_tokens bounds.
"""

import asyncio
import itertools

from ...metrics import counts_of, metrics_of
from .engine_thread import ENGINE_FAILED, EngineThread
from .messages import Accepted, Cancel, Delta, Failed, Refused, Submit

STOPPED = "the server is shutting down"


class Full(Exception):
    """As many outputs run and wait as may."""


class Broken(Exception):
    """The engine has failed, or the server ends."""


class Job:
    """The events of one job, as they come."""

    def __init__(self, number, num_outputs):
        self.number, self.num_outputs, self.num_open = number, num_outputs, num_outputs
        self.deadline = None  # in the event loop's time
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
        while self.num_open:
            events = await self.take(idle)
            self.num_open -= sum(event.finish_reason is not None for event in events)
            yield events


class EngineClient:
    """llm: an LLM that nobody else calls; max_waiting: the most outputs that wait for a seat; figures: a Figures."""

    def __init__(self, llm, max_waiting, figures):
        self._llm, self._figures = llm, figures
        self.most = llm.engine.max_num_seqs + max_waiting  # outputs, running ones included
        self.num_outputs = 0  # of open jobs
        self.failure = None  # why no job is taken any more
        self._numbers, self._jobs = itertools.count(), {}
        self._loop, self._thread = None, EngineThread(llm.session, self._post)

    def start(self):
        """Start the engine's thread; its events come to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self):
        """End the thread; any thread may."""
        self.failure = self.failure or STOPPED
        return self._thread.stop()

    def abort(self, reason=STOPPED):
        """End every open job with Broken, and take no further ones."""
        self.failure = self.failure or reason
        for job in self._jobs.values():
            job.put(Failed(reason))

    def check(self, prompt, params, number):
        """The CheckedPrompt of a prompt; any thread may. It reads the tokenizer and sizes, nothing that a step changes."""
        return self._llm.session.check(prompt, params, number)

    def metrics(self):
        """vLLM's counters and gauges of the engine."""
        return metrics_of(counts_of(self._llm.engine), self._llm.model_name)

    async def open(self, prompts, streamed):
        """Submit CheckedPrompts as one job.  -> Job, which the engine has queued. Raises Full, Broken, ValueError."""
        count = sum(checked.params.n for checked in prompts)
        if self.failure:
            raise Broken(self.failure)
        if count > self.most:
            raise ValueError(f"prompts and n make {count} outputs; at most {self.most} may run and wait: ask for fewer")
        if self.num_outputs + count > self.most:
            raise Full(f"{self.num_outputs} outputs run and wait, and at most {self.most} may: try again later")
        job = Job(next(self._numbers), count)
        self._jobs[job.number] = job
        self.num_outputs += count
        try:
            self._thread.send(Submit(job.number, prompts, streamed))
            while not (events := await job.take()):
                pass
            answer, *rest = events
            if isinstance(answer, Refused):
                job.num_open = 0
                raise ValueError(answer.reason)
            assert isinstance(answer, Accepted)
            for event in rest:
                job.put(event)
        except BaseException:
            self.close(job)
            raise
        return job

    def close(self, job):
        """The job's reader has had enough: cancel what has not ended."""
        if self._jobs.pop(job.number, None) is not None:
            self.num_outputs -= job.num_outputs
            self._figures.forget(job.number)
            if job.num_open:
                self._thread.send(Cancel(job.number))

    def _post(self, events):
        """In the engine's thread: one wake-up of the event loop per step."""
        try:
            self._loop.call_soon_threadsafe(self._hand_out, events)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _hand_out(self, events):
        for number, event in events:
            if number is None:
                self.failure = ENGINE_FAILED
                continue
            job = self._jobs.get(number)
            if job is None:  # its reader has left
                continue
            if isinstance(event, Delta):
                self._figures.observe(number, event)
            job.put(event)
