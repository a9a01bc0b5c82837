"""The thread that drives the engine for the server: messages in, one list of events out per step.

    thread = EngineThread(session, post)    # post([(job, event), ...]) is called in the thread
    thread.start()
    thread.send(Submit(7, checked_prompts, streamed=True))

Nothing else of the server touches the engine while the thread runs, except its counters, which any thread may read. After a step
that raises, every job is told, and so is every later one: the thread never leaves a job without an answer. Not done here: asyncio,
HTTP, checking of prompts.
"""

import logging
import threading
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ...line import Call
from .growing_output import GrowingOutput
from .messages import Accepted, Cancel, Failed, Refused, Stop, Submit

log = logging.getLogger("headstart.server")
ENGINE_FAILED = "the engine has failed: restart the server"


@dataclass
class _Job:
    streamed: bool  # whether every piece is told
    submissions: list = field(default_factory=list)
    num_open: int = 0  # outputs that have not ended


class EngineThread:
    """session: the Session of an LLM that nobody else calls; post: called with the events of a step, must not block."""

    def __init__(self, session, post):
        self._session, self._post = session, post
        self._inbox = SimpleQueue()
        self._jobs = {}  # {number: _Job} of jobs that have not ended
        self._outputs = {}  # {Request: GrowingOutput} of outputs that have not ended
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self):
        self._thread.start()

    def send(self, message):
        """Hand over a message; any thread may."""
        self._inbox.put(message)

    def stop(self, timeout=10):
        """Cancel everything, and wait until the thread has ended.  -> whether it has"""
        if self._thread.is_alive():
            self.send(Stop())
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self):
        while self._obey():
            if self._outputs:
                try:
                    self._step()
                except BaseException as error:
                    self._fail(error)

    def _obey(self):
        """Do what the messages say that have come; wait for one if nothing runs.  -> False to end"""
        wait = not self._outputs
        while True:
            try:
                message = self._inbox.get(block=wait)
            except Empty:
                return True
            wait = False
            if isinstance(message, Stop):
                for job in list(self._jobs):
                    self._drop(job)
                return False
            try:
                if isinstance(message, Cancel):
                    self._drop(message.job)
                else:
                    self._submit(message)
            except BaseException as error:
                self._fail(error)
                if isinstance(message, Submit):
                    self._post([(message.job, Failed(ENGINE_FAILED))])

    def _submit(self, message):
        if self._failed:
            self._post([(message.job, Failed(ENGINE_FAILED))])
            return
        session, job = self._session, _Job(message.streamed)
        self._jobs[message.job] = job
        try:
            for checked in message.prompts:
                job.submissions.append(session.submit(checked, call=Call(is_stream=message.streamed)))
        except ValueError as error:
            self._drop(message.job)
            self._post([(message.job, Refused(str(error)))])
            return
        for prompt, submission in enumerate(job.submissions):
            for request in submission.requests:
                eos_token_ids = session.engine.eos_token_ids
                self._outputs[request] = GrowingOutput(message.job, prompt, request, eos_token_ids)
                job.num_open += 1
        self._post([(message.job, Accepted())])

    def _drop(self, number):
        """Cancel what has not ended of a job, so that its seats and pages are free before the next step."""
        job = self._jobs.pop(number, None)
        for submission in job.submissions if job else ():
            for request in submission.requests:
                self._outputs.pop(request, None)
            self._session.cancel(submission)

    def _step(self):
        events, advanced = [], self._session.step()
        try:
            # In the order of the prompts and their outputs: a prompt's first output brings the log-probabilities of the prompt.
            for request in sorted(set(advanced), key=lambda request: request.request_id):
                output = self._outputs.get(request)
                if output is not None and (request.finished or self._jobs[output.job].streamed):
                    events.append((output.job, self._news(output)))
        finally:
            if events:
                self._post(events)

    def _news(self, output):
        """The Delta of an output; it is forgotten if it has ended."""
        number, job = output.job, self._jobs[output.job]
        try:
            delta = output.delta()
        except Exception as error:  # a text that the tokenizer cannot decode is the end of its own job only
            log.error("an output could not be turned into text: %s", type(error).__name__)
            self._drop(number)
            return Failed("the output could not be turned into text")
        if output.request.finished:
            del self._outputs[output.request]
            job.num_open -= 1
            if not job.num_open:
                del self._jobs[number]
        return delta

    def _fail(self, error):
        """Tell every job that the engine broke off, and take no further ones."""
        log.critical("the engine has failed; every request is told, and /health says 503", exc_info=error)
        self._failed, jobs = True, list(self._jobs)
        self._jobs, self._outputs = {}, {}
        self._post([(None, Failed(ENGINE_FAILED)), *((job, Failed(ENGINE_FAILED)) for job in jobs)])
