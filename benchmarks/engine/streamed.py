"""The time of every step of an engine whose outputs are streamed, as the server's engine process runs it.

That is EngineLoop (inference/server/driver): after each step it takes commands and sends one message with the new tokens of all
outputs. What is measured is therefore all that streams cost the engine; their text and HTTP are another process's work.
"""

import socket
import threading
import time

from ...evaluation.step_recorder import StepRecord
from ...inference.server.driver.engine_loop import EngineLoop
from ...inference.server.driver.messages import Submit
from ...inference.server.driver.wire import Wire, packed

READ = 2**20  # bytes


def record_streamed_steps(session, prompts, params):
    """Run prompts on a Session to their end, each as a stream of its own.  -> StepRecord without submissions

    prompts: as LLM.generate takes them; params: SamplingParams of all, for one output each.
    """
    checked = [session.check(prompt, params, number) for number, prompt in enumerate(prompts)]
    submits = b"".join(packed(Submit(number, [one], streamed=True)) for number, one in enumerate(checked))
    ours, theirs = socket.socketpair()

    def read():
        theirs.sendall(submits)
        while theirs.recv(READ):
            pass

    reader = threading.Thread(target=read, name="streams", daemon=True)
    with theirs:
        noted = _NotedSession(session, len(checked), all_ended=lambda: theirs.shutdown(socket.SHUT_WR))
        reader.start()
        failed = EngineLoop(noted, Wire(ours)).run()
        reader.join()
    if failed:
        raise RuntimeError("the engine failed while it streamed; the log says why")
    return noted.record


class _NotedSession:
    """A Session whose steps are noted; all_ended: called when that many outputs have ended."""

    def __init__(self, session, num_outputs, all_ended):
        self._session, self._left, self._all_ended = session, num_outputs, all_ended
        self.record = StepRecord([])

    def __getattr__(self, name):
        return getattr(self._session, name)

    def step(self):
        advanced = self._session.step()
        metrics = self._session.engine.metrics
        self.record.notes.append(
            (time.perf_counter(), metrics.num_decoded_tokens, metrics.num_prompt_tokens, len(advanced))
        )
        self._left -= sum(request.finished for request in set(advanced))
        if not self._left:
            self._all_ended()
        return advanced
