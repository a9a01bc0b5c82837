"""The loop that drives the engine for the server: commands in, steps, one message of news out per step (messages.py).

    EngineLoop(llm.session, Wire(connection)).run()

Nothing else touches the engine while it runs. It ends when the other side closes the connection. A step that raises ends it, too:
the connection is closed, which tells the other side. A step that found no memory on the device is done again. If another finds
none before every output has gone on, the job that needs most is given up; answers of others stay the same. Text is no work of
this side, except that stop strings are looked for where an output ends, in the engine. Grammars, which may take seconds to
compile, are compiled in a thread, beside the steps, and those of all jobs fit in a bound of memory: a job that is one too many
waits until others have ended. Not done here: processes, HTTP, checking of prompts.
"""

import logging
import os
import time
from bisect import bisect_left
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from ...grammar.grammars import fit
from ...line import Call
from ...metrics import counts_of
from .messages import Accepted, Cancel, End, GivenUp, Refused, Submit
from .wire import Closed

NO_MEMORY = "the device has no memory left for this request: ask for fewer log-probabilities, or try again later"
LOOK_AGAIN = 0.005  # seconds between two looks for commands while a grammar is compiled and nothing runs
log = logging.getLogger("headstart.server")


@dataclass
class _Job:
    streamed: bool  # whether every token is told
    grammars: set  # Grammars, which stay in memory until the job ends
    submissions: list = field(default_factory=list)
    num_open: int = 0  # outputs that have not ended


@dataclass
class _Waiting:
    """A job that waits for its grammars."""

    command: Submit
    queued_ts: float = field(default_factory=time.monotonic)
    compiled: Future | None = None  # of the grammars, once there is room for them
    accepted: bool = False  # whether that was told: the wait for room may take as long as the answers of others

    @property
    def num_outputs(self):
        return sum(checked.params.n for checked in self.command.prompts)


@dataclass
class _Output:
    job: int
    prompt: int
    num_told: int = 0  # tokens


class EngineLoop:
    """session: the Session of an LLM that nobody else calls; wire: a Wire"""

    def __init__(self, session, wire):
        self._session, self._wire = session, wire
        self._jobs = {}  # {number: _Job} of jobs that have not ended
        self._outputs = {}  # {Request: _Output} of outputs that have not ended
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._compiling = {}  # {number: _Waiting} in order
        self._behind = {}  # {request: its tokens} since a step found no memory: outputs it ran that have no further token yet

    def run(self):
        """Until the other side closes the connection.  -> the exit status: 1 if the engine has failed"""
        try:
            while True:
                if commands := self._wire.receive(wait=not self._outputs and not self._compiling):
                    self._tell([news for command in commands if (news := self._obey(command))])
                if self._compiling:
                    self._start_compiled()
                if self._outputs:
                    self._step()
        except Closed:
            return 0
        except BaseException as error:
            log.critical("the engine has failed; every request is told, and /health says 503", exc_info=error)
            return 1
        finally:
            self._compiler.shutdown(wait=False, cancel_futures=True)
            self._wire.close()

    def _tell(self, news):
        # Without news, too: the other side sees that the engine goes on, and what it counts.
        counts = counts_of(self._session.engine)
        counts["gauges"]["num_requests_waiting"] += sum(waiting.num_outputs for waiting in self._compiling.values())
        self._wire.send((news, counts))

    def _obey(self, command):
        """Do what a command says.  -> (job, event) of the answer, or None"""
        if isinstance(command, Cancel):
            self._drop(command.job)
            return None
        if _grammars_of(command):
            self._compiling[command.job] = _Waiting(command)
            return None
        return self._start(_Waiting(command))

    def _compile(self):
        """Compile for the jobs that wait, in order, as long as the grammars of all jobs that have not ended fit in memory.

        Jobs that have to wait for the end of others are told that they are accepted.
        """
        used, accepted = set().union(*(job.grammars for job in self._jobs.values())), []
        for number, waiting in self._compiling.items():
            grammars = _grammars_of(waiting.command)
            if waiting.compiled is None:
                if accepted or (used and not fit(used | grammars)):
                    accepted.append(number)
                    continue
                waiting.compiled = self._compiler.submit(list, map(self._session.grammars.compile, grammars))
            used |= grammars
        if news := [(number, Accepted()) for number in accepted if not self._compiling[number].accepted]:
            for number, _ in news:
                self._compiling[number].accepted = True
            self._tell(news)

    def _start_compiled(self):
        """Start the jobs whose grammars are compiled; where nothing runs, wait for them a little."""
        self._compile()
        begun = {number: one.compiled for number, one in self._compiling.items() if one.compiled is not None}
        if not self._outputs:
            wait(begun.values(), LOOK_AGAIN, FIRST_COMPLETED)
        done = [number for number, compiled in begun.items() if compiled.done()]
        if done:
            self._tell([news for number in done if (news := self._start(self._compiling.pop(number)))])

    def _start(self, waiting):
        """Start the job of a Submit.  -> (job, event), or None"""
        session, command = self._session, waiting.command
        job = self._jobs[command.job] = _Job(command.streamed, _grammars_of(command))
        try:
            if waiting.compiled is not None:
                waiting.compiled.result()
            for checked in command.prompts:
                job.submissions.append(session.submit(checked, call=Call(is_stream=command.streamed)))
        except ValueError as error:
            self._drop(command.job)
            return command.job, (GivenUp if waiting.accepted else Refused)(str(error))
        for prompt, submission in enumerate(job.submissions):
            for request in submission.requests:
                request.times.queued_ts = waiting.queued_ts
                self._outputs[request] = _Output(command.job, prompt)
                job.num_open += 1
        return None if waiting.accepted else (command.job, Accepted())

    def _drop(self, number):
        """Cancel what has not ended of a job, so that its seats and pages are free before the next step."""
        if number in self._compiling:
            waiting = self._compiling.pop(number)
            if waiting.compiled is not None:
                waiting.compiled.cancel()
        job = self._jobs.pop(number, None)
        for submission in job.submissions if job else ():
            for request in submission.requests:
                self._outputs.pop(request, None)
            self._session.cancel(submission)

    def _step(self):
        try:
            advanced = self._session.step()
        except torch.OutOfMemoryError:
            advanced = None
        if advanced is None:  # the error is gone by now, and with it what the broken step held
            self._make_room()
        else:
            self._tell(self._news(advanced))
            if self._behind:
                self._behind = self._still_behind()

    def _news(self, advanced):
        """(job, event) of those of these requests whose tokens are told now."""
        news = []
        # In the order of the prompts and their outputs: a prompt's first output brings the log-probabilities of the prompt.
        for request in sorted(set(advanced), key=lambda request: request.request_id):
            output = self._outputs.get(request)
            if output is not None and (request.finished or self._jobs[output.job].streamed):
                news.append((output.job, self._new_tokens(request, output)))
        return news

    def _make_room(self):
        """Free what the allocator keeps; the second time give up the job that needs most, of equal ones the youngest."""
        torch.cuda.empty_cache()
        news, given_up = self._news([request for request in self._outputs if request.finished]), False
        if self._still_behind():
            job = self._outputs[max(self._started(), key=_need)].job
            self._drop(job)
            news.append((job, GivenUp(NO_MEMORY)))
            given_up = True
        self._behind = {request: len(request.output_token_ids) for request in self._started()}
        log.warning("a step found no memory on the device%s", "; a request was given up" if given_up else "")
        self._tell(news)

    def _started(self):
        """The open outputs that have had a seat."""
        return [request for request in self._outputs if request.times.scheduled_ts]

    def _still_behind(self):
        """Of the outputs that a step without memory ran, those that have neither ended nor gone on.

        A good step is not enough: the prompts that are computed again may fit where drafts do not.
        """
        return {
            request: count
            for request, count in self._behind.items()
            if request in self._outputs and len(request.output_token_ids) == count
        }

    def _new_tokens(self, request, output):
        """The fields of Tokens, of a request's tokens since the last ones; it is forgotten if it has ended."""
        start, end, drafts = output.num_told, None, request.accepted_drafts
        output.num_told = len(request.output_token_ids)
        if request.finished:
            end = End(request.finish_reason, request.stop_reason, request.metrics, request.times)
            del self._outputs[request]
            job = self._jobs[output.job]
            job.num_open -= 1
            if not job.num_open:
                del self._jobs[output.job]
        # A plain tuple: 64 of them are pickled in 8 microseconds, 64 Tokens in 54.
        return (
            output.prompt,
            request.sample_index,
            request.output_token_ids[start:],
            [place - start for place in drafts[bisect_left(drafts, start) :] if place < output.num_told],
            None if request.logprobs is None else request.logprobs.after(start),
            request.prompt_logprobs if start == 0 else None,
            request.num_cached_tokens,
            end,
        )


def give_up(error):
    """End this process at once, whatever it does: a rank of the engine has ended, and a step may wait for it forever."""
    log.critical("the engine has failed; every request is told, and /health says 503: %s", error)
    os._exit(1)


def _grammars_of(command):
    """The Grammars of a Submit."""
    return {checked.grammar for checked in command.prompts} - {None}


def _need(request):
    """What memory a request takes beyond its pages, as a key to compare by."""
    return request.params.prompt_logprobs is not None, request.params.logprobs is not None, request.request_id
