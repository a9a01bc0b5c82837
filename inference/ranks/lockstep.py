"""Ranks in lockstep: rank 0 says, step by step, what came before the step; every rank then takes the same step on its own engine.

    session = LeadingSession(engine, ..., ranks=RankProcesses)      # rank 0, in the place of a Session
    follow(llm, connection)                                         # every other rank

An engine's decisions follow from the requests it was given and from its own tokens, and every rank has all logits. So ranks that
are told the same requests in the same order, before the same steps, schedule the same rows and draw the same tokens. What is
measured differs from rank to rank: the seconds of a step, from which the depth of drafts is chosen (adaptive.py). So rank 0's are
sent with its next step. After each step all ranks compare what they drew, and the bits of the hidden states that they computed up
to the step before: else it would go unnoticed if they differed.

What a caller asks between two steps is kept until the next one: requests, cancellations, a forgotten prefix cache. Ctrl-C waits
for the end of a step. A step that raises on any rank ends all of them: what the others have computed by then is not known.
"""

import signal
import threading
import zlib
from array import array
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...kernels.jit import on_device
from ..checked_prompt import CheckedPrompt
from ..models.transport import RankLost
from ..session import Session
from .processes import receive, send


@dataclass(frozen=True)
class Submitted:
    """A prompt was queued."""

    prompt: CheckedPrompt
    number: int
    is_streamed: bool


@dataclass(frozen=True)
class Cancelled:
    """Requests were dropped."""

    request_ids: list


@dataclass(frozen=True)
class Forgotten:
    """The prefix cache was emptied."""


@dataclass(frozen=True)
class TakeStep:
    """Take a step.  before: what happened since the last one; measured: of steps that were recorded since; recording: candidates"""

    before: list
    measured: list
    recording: bool


class LedPlan:
    """Rank 0's plan of the depth of drafts (adaptive.py): the given one, whose measurements are kept for the other ranks."""

    def __init__(self, plan):
        self._plan, self._records = plan, []
        self.depths, self.measures = plan.depths, plan.measures
        self.choose, self.best = plan.choose, plan.best
        self.choose_beside, self.best_beside = plan.choose_beside, plan.best_beside

    def record(self, num_requests, place, seconds, accepted, confidence=()):
        self._plan.record(num_requests, place, seconds, accepted, confidence)
        self._records.append((seconds, confidence))

    def take_measured(self):
        """What ranks may measure differently, of all records since the last call: [(seconds, confidence), ...]."""
        measured, self._records = self._records, []
        return measured


class FollowedPlan(LedPlan):
    """The plan of another rank, which records what rank 0 measured: its seconds, and what its drafts say of themselves."""

    def record(self, num_requests, place, seconds, accepted, confidence=()):
        self._records.append((num_requests, place, accepted))

    def settle(self, measured):
        """Record what has waited for this, before the next choice."""
        records, self._records = self._records, []
        for (num_requests, place, accepted), (seconds, confidence) in zip(records, measured, strict=True):
            self._plan.record(num_requests, place, seconds, accepted, confidence)


class LeadingSession(Session):
    """The Session of rank 0.  engine: an Engine with a LedPlan; ranks: the RankProcesses of the others"""

    def __init__(self, *given, ranks):
        super().__init__(*given)
        self.ranks = ranks
        self._queued = deque()  # (Submitted, requests) that no step has seen
        self._states = StateDigest(self.engine.decoder)
        self._before = []  # what the other ranks have not been told

    def _queue(self, submission, number, call):
        self.ranks.check()
        for request in submission.requests:
            self.engine.scheduler.check_fits(request)
        for request in submission.requests:
            self._calls[request] = call
        # Any thread may queue during a step, which the other ranks take without these requests.
        self._queued.append((Submitted(submission.prompt, number, call.is_stream), submission.requests))

    def _advance(self):
        self.ranks.check()
        with _uninterrupted():
            self._take_queued()
            before, self._before = self._before, []
            try:
                self.ranks.send(TakeStep(before, self.engine.plan.take_measured(), self.engine.record_candidates))
                advanced = self.engine.step()
                self.ranks.check()  # on GPUs nobody waits for a rank that has ended, and what was computed is void
                self.ranks.compare(digest_of(advanced, self.engine.tree.max_depth + 1, self._states.take()))
                return advanced
            except BaseException as error:
                # Where a rank has ended, what else went wrong came of void results.
                if isinstance(error, RankLost) or (isinstance(error, Exception) and self.ranks.have_ended()):
                    fault = self.ranks.fault()
                    raise fault from (error.__cause__ if error is fault else error)
                self.ranks.end()
                raise

    def _drop(self, requests):
        with _uninterrupted():
            self._take_queued()
            super()._drop(requests)
            self._before.append(Cancelled([request.request_id for request in requests]))

    def _forget(self):
        with _uninterrupted():
            self._take_queued()
            self._before.append(Forgotten())
            return super()._forget()

    def _take_queued(self):
        while self._queued:
            submitted, requests = self._queued.popleft()
            for request in requests:
                self.engine.add(request)
            self._before.append(submitted)


def follow(llm, connection):
    """Take the steps that rank 0 takes, until it closes the connection (EOFError or ConnectionError).  llm: of this rank"""
    session, engine, requests = llm.session, llm.session.engine, {}
    states = StateDigest(engine.decoder)
    while True:
        step = receive(connection)
        for event in step.before:
            if isinstance(event, Submitted):
                for request in session.requests_of(event.prompt, event.number, event.is_streamed):
                    requests[request.request_id] = request
                    engine.add(request)
            elif isinstance(event, Cancelled):
                for request in [requests.pop(name) for name in event.request_ids if name in requests]:
                    engine.cancel(request)
            else:
                engine.reset_prefix_cache()
        engine.plan.settle(step.measured)
        engine.record_candidates = step.recording
        advanced = engine.step()
        send(connection, digest_of(advanced, engine.tree.max_depth + 1, states.take()))
        for request in advanced:
            if request.finished:
                requests.pop(request.request_id, None)
        engine.recorded.clear()


class StateDigest:
    """The digest of a Decoder after each step, read one step late, so that nobody waits for the device."""

    def __init__(self, decoder):
        self._decoder, self._copied = decoder, None

    def take(self):
        """After a step: the digest after the step before, 0 after the first one."""
        digest, before = self._decoder.digest, self._copied
        with on_device(digest.device):
            copy = torch.empty(1, dtype=torch.int64, pin_memory=digest.is_cuda).copy_(digest, non_blocking=True)
            self._copied = copy, torch.cuda.current_stream().record_event() if digest.is_cuda else None
        if before is None:
            return 0
        number, event = before
        if event is not None:
            event.synchronize()
        return int(number)


def digest_of(advanced, width, states):
    """One number for a step: its requests, whether they ended, their newest `width` tokens; and `states` (StateDigest)."""
    numbers = array("q", [states])
    for request in advanced:
        tokens = request.output_token_ids
        numbers.extend((*request.request_id, request.finished, len(tokens), *tokens[-width:]))
    return zlib.crc32(numbers)


@contextmanager
def _uninterrupted():
    """Ctrl-C in here waits for the end of the block. Only the main thread is interrupted by it."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        raise KeyboardInterrupt
