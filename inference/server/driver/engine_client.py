"""The asyncio side of the engine's process: jobs whose events are awaited, a limit to those that wait, and a watch on its steps.

    await client.start()
    job = await client.open(checked_prompts, streamed=True)    # Full, Broken or ValueError instead
    try:
        async for events in job.batches(): ...                 # Broken if the engine fails
    finally:
        client.close(job)                                      # cancels what has not ended

All methods are called in the event loop. Tokens become text here, so that the engine's process has less to do. A slow reader fills
its own job's list only, which its max_tokens bounds. However the process ends, every job is told at once, and every later one.
"""

import asyncio
import itertools
import logging
from contextlib import suppress

from ...metrics import metrics_of
from .engine_process import ending
from .growing_output import GrowingOutput
from .job import Broken, Failed, Full, Job
from .messages import Accepted, Cancel, GivenUp, Refused, Submit, Tokens
from .wire import Closed, packed, read_message

STOPPED = "the server is shutting down"
ENGINE_FAILED = "the engine has failed: restart the server"
STEP_TIMEOUT = 300.0  # seconds, on a GPU; on a CPU a step that computes a long prompt may take longer
LOOK_AGAIN = 1.0  # seconds
log = logging.getLogger("headstart.server")


class EngineClient:
    """engine: an EngineProcess whose engine is built; tokenizer: the LLM's; options: ServerOptions; figures: a Figures"""

    def __init__(self, engine, tokenizer, options, figures):
        info = engine.info
        self._engine, self._figures, self._tokenizer = engine, figures, tokenizer
        self._model_name, self._counts, self._eos_token_ids = (
            info.model_name,
            info.counts,
            info.prompt_checker.eos_token_ids,
        )
        self._most = info.max_num_seqs + options.max_waiting  # outputs, running ones included
        given = options.step_timeout
        self._step_timeout = (STEP_TIMEOUT if info.device == "cuda" else 0) if given is None else given
        self._quiet = 0.0  # seconds without a word of the engine, while outputs run
        self.num_outputs = 0  # of open jobs
        self.failure = None  # why no job is taken any more
        self._numbers, self._jobs = itertools.count(), {}
        self._writer, self._tasks = None, ()
        self._turn = asyncio.Lock()  # of the job that is submitted

    async def start(self):
        """Listen to the engine, in the running event loop."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._engine.connection)
        self._tasks = asyncio.create_task(self._listen(reader)), asyncio.create_task(self._watch())

    def abort(self, reason=STOPPED):
        """End every open job with Broken, and take no further ones."""
        if not self.failure:
            self._figures.give_up(sum(job.num_running for job in self._jobs.values()))
        self.failure = self.failure or reason
        for job in self._jobs.values():
            job.put(Failed(self.failure))
            if not job.submitted and job.limit is not None:
                job.limit.reschedule(0)

    def metrics(self):
        """vLLM's counters and gauges of the engine, after its last step."""
        counts = self._counts
        if self.failure:  # it tells nothing any more
            counts = counts | {"gauges": dict.fromkeys(counts["gauges"], 0)}
        return metrics_of(counts, self._model_name)

    async def open(self, prompts, streamed, deadline=None):
        """Submit CheckedPrompts as one job.  -> Job, which the engine has queued. Raises Full, Broken, ValueError, TimeoutError.

        deadline: of the job, in the event loop's time
        """
        count = sum(checked.params.n for checked in prompts)
        if self.failure:
            raise Broken(self.failure)
        if count > self._most:
            raise ValueError(
                f"prompts and n make {count} outputs; at most {self._most} may run and wait: ask for fewer"
            )
        if self.num_outputs + count > self._most:
            raise Full(
                f"{self.num_outputs} outputs run and wait, and at most {self._most} may (--max-num-seqs and --max-waiting): try "
                "again later"
            )
        job = Job(next(self._numbers), self._outputs(prompts), deadline)
        self._jobs[job.number] = job
        self.num_outputs += count
        try:
            await self._submit(job, prompts, streamed)
            while not (events := await job.take()):
                pass
            answer, *rest = events
            if isinstance(answer, Refused):
                raise ValueError(answer.reason)
            assert isinstance(answer, Accepted)
            for event in rest:
                job.put(event)
        except BaseException:
            self.close(job)
            raise
        return job

    async def _submit(self, job, prompts, streamed):
        """Tell the engine of a job, once it has read what was told before.

        During a long step it reads nothing: what clients submit and leave must not pile up here.
        """
        try:
            async with asyncio.timeout_at(job.deadline) as job.limit, self._turn:
                with suppress(ConnectionError):  # the engine has ended: _listen says how
                    await self._writer.drain()
                if self.failure or self._writer.is_closing():
                    raise Broken(self.failure or ENGINE_FAILED)
                self._writer.write(packed(Submit(job.number, prompts, streamed)))
                job.submitted = True
        except TimeoutError:
            if self.failure:
                raise Broken(self.failure) from None
            raise

    def close(self, job):
        """The job's reader has had enough: cancel what has not ended."""
        if self._jobs.pop(job.number, None) is not None:
            self.num_outputs -= len(job.outputs)
            self._figures.forget(job.number)
            if job.submitted and job.num_running and not self._writer.is_closing():
                self._writer.write(packed(Cancel(job.number)))

    def _outputs(self, prompts):
        return {
            (number, sample): GrowingOutput(self._tokenizer, self._eos_token_ids, checked.params)
            for number, checked in enumerate(prompts)
            for sample in range(checked.params.n)
        }

    async def _listen(self, reader):
        """Hand out what the engine says, until it ends."""
        try:
            while True:
                news, self._counts = await read_message(reader)
                self._quiet = 0.0
                for number, event in news:
                    if job := self._jobs.get(number):  # else its reader has left
                        job.put(self._taken(job, event))
        except Closed:
            self.abort(ENGINE_FAILED)
            await asyncio.to_thread(self._engine.wait, 5)
            log.critical("the engine's process %s; every request was told", ending(self._engine.exit_status))
        except Exception as error:
            self._fail(ENGINE_FAILED, error)
        finally:
            self._writer.close()

    def _taken(self, job, event):
        """What an event means to the reader of its job."""
        if isinstance(event, GivenUp):
            self._figures.give_up(job.num_running)
        if isinstance(event, Refused | GivenUp):
            job.num_running = 0
        if isinstance(event, GivenUp):
            return Failed(event.reason)
        if not isinstance(event, tuple):
            return event
        tokens = Tokens(*event)
        job.num_running -= tokens.end is not None
        try:
            delta = job.outputs[tokens.prompt, tokens.sample].grow(tokens)
        except Exception as error:  # a text that the tokenizer cannot decode is the end of its own job only
            log.error("an output could not be turned into text: %s", type(error).__name__)
            return Failed("the output could not be turned into text")
        self._figures.observe(job.number, delta)
        return delta

    async def _watch(self):
        """See that steps end.

        Looks are counted, not time: a server that was itself stopped meanwhile, by Ctrl-Z or a debugger, must not blame the engine.
        """
        limit = self._step_timeout
        look = min(LOOK_AGAIN, limit / 4)
        while limit and not self.failure:
            await asyncio.sleep(look)
            runs = any(job.num_running for job in self._jobs.values())
            self._quiet = self._quiet + look if runs else 0.0
            if self._quiet > limit:
                told = f"a step of the engine took more than {limit:g} seconds (--step-timeout): restart the server"
                self._fail(told)

    def _fail(self, reason, error=None):
        """Tell every job, and end the process."""
        log.critical("%s; every request is told, and /health says 503", reason, exc_info=error)
        self.abort(reason)
        self._engine.kill()
