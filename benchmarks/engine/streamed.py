"""The time of every step of an engine whose outputs are streamed, as the server's engine process runs it.

That is EngineLoop (inference/server/driver), with the heap frozen: after each step it takes commands and sends one message with the
new tokens of all outputs. What is measured is therefore all that streams cost the engine. Their text and HTTP are another process's
work; here a thread reads the messages, unopened, and takes a little of Python's lock.
"""

import socket
import threading
import time
from contextlib import contextmanager, suppress

from ...evaluation.step_recorder import StepRecord
from ...inference.frozen_heap import frozen_heap
from ...inference.server.driver.engine_loop import EngineLoop
from ...inference.server.driver.messages import Submit
from ...inference.server.driver.wire import Closed, Wire, packed

READ = 2**20  # bytes


def record_streamed_steps(session, prompts, params):
    """Run prompts on a Session to their end, each as a stream of its own.  -> StepRecord without submissions

    prompts: as LLM.generate takes them; params: SamplingParams of all, for one output each. Raises what the session raises: an
    engine that gives outputs up for want of memory is not what is measured.
    """
    checked = [session.check(prompt, params, number) for number, prompt in enumerate(prompts)]
    submits = b"".join(packed(Submit(number, [one], streamed=True)) for number, one in enumerate(checked))
    ours, theirs = socket.socketpair()
    with ours, theirs, frozen_heap():
        noted = _NotedSession(session, len(checked), all_ended=lambda: theirs.shutdown(socket.SHUT_WR))
        reader = threading.Thread(target=_read, args=(theirs, submits), name="streams", daemon=True)
        reader.start()
        failed = EngineLoop(noted, Wire(ours)).run()
        reader.join()
    if failed or noted.error is not None:
        for submission in noted.submissions:
            session.cancel(submission)
    if noted.error is not None:
        raise noted.error
    if failed:
        raise RuntimeError("the engine failed while it streamed; the log says why")
    return noted.record


def _read(connection, submits):
    """Send the commands, and read until the engine's side is closed."""
    try:
        with suppress(ConnectionError):
            connection.sendall(submits)
            while connection.recv(READ):
                pass
    finally:  # after an error, too: the engine would wait for commands
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _NotedSession:
    """A Session whose steps are noted. all_ended: called when that many outputs have ended; error: what ended the loop, or None.

    The loop answers some errors with a refusal and goes on; here each of them ends it.
    """

    def __init__(self, session, num_outputs, all_ended):
        self._session, self._left, self._all_ended = session, num_outputs, all_ended
        self.record, self.submissions, self.error = StepRecord([]), [], None

    def __getattr__(self, name):
        return getattr(self._session, name)

    def submit(self, *given, **named):
        with self._errors_end_the_loop():
            self.submissions.append(self._session.submit(*given, **named))
        return self.submissions[-1]

    def step(self):
        with self._errors_end_the_loop():
            advanced = self._session.step()
        metrics = self._session.engine.metrics
        self.record.notes.append(
            (time.perf_counter(), metrics.num_decoded_tokens, metrics.num_prompt_tokens, len(advanced))
        )
        self._left -= sum(request.finished for request in set(advanced))
        if not self._left:
            self._all_ended()
        return advanced

    @contextmanager
    def _errors_end_the_loop(self):
        try:
            yield
        except BaseException as error:
            self.error = error
            raise Closed from None
