"""The line of threads that wait for one engine: the first in line drives it, for all of them. No thread is made, no lock is held.

Being first is all there is to driving. A call joins and leaves the line by single operations on a deque, which neither another
thread nor an interrupt can cut in two. So an engine has one driver at any time, and a driver that is interrupted leaves the line to
the next one. Not done here: what a step is, and what callers are told (session.py).
"""

import os
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue

# A waiting thread looks again after this many seconds. It is rung for whatever happens, unless an interrupt comes before the ring.
LOOK_AGAIN = 0.5


class Call:
    """A call on a session, and what the driver tells it between two steps.

    is_stream: whether it is told of every token, and not only of requests that end.
    """

    def __init__(self, is_stream=False):
        self.is_stream = is_stream
        self.ended = set()  # its requests that have ended; the caller may take them out
        self.num_tokens = 0  # of a stream: tokens that its request has been given
        self._bell = SimpleQueue()

    def ring(self):
        """Wake the thread that waits for this call, or keep it from sleeping the next time."""
        if self._bell.empty():
            self._bell.put(None)

    def wait(self):
        """Sleep until the bell rings."""
        with suppress(Empty):
            self._bell.get(timeout=LOOK_AGAIN)


class Line:
    """Calls of several threads on one engine, in the order in which they came."""

    def __init__(self):
        self._places = deque()  # of (Call, process, thread)
        self._errands = deque()  # functions to call when no step runs

    def drive(self, call, step, enough):
        """Step while this call is first in line, and sleep while it is not, until it has had enough.  -> the last x

        enough(x) is asked after every step and every sleep; x: what step() returned, after a sleep None. Raises what a step of this
        thread raises, and RuntimeError where a call before this one can never end.
        """
        places, place = self._places, _place_of(call)
        try:
            places.append(place)
            while True:
                taken = None
                if places[0] is place:
                    self._do_errands()
                    taken = step()
                else:
                    self._check_neighbours(place)
                    call.wait()
                if enough(taken):
                    return taken
        finally:
            # Written out in both places: an interrupt could come at the first line of a function, before it has left.
            if place in places:
                places.remove(place)
            self._left()

    def between_steps(self, work):
        """Do work() while no step runs: now, or before the driver's next step. Waits for nothing, so a finaliser may call it."""
        self._errands.append(work)
        self.unless_driven(lambda: None)

    def unless_driven(self, work):
        """work(), done at once; None if a thread drives."""
        places, place = self._places, _place_of(Call())
        try:
            places.append(place)
            if places[0] is place:
                self._do_errands()
                return work()
        finally:
            if place in places:
                places.remove(place)
            self._left()

    def _do_errands(self):
        """Only for the first in line. An interrupted errand is done again."""
        while self._errands:
            try:
                self._errands[0]()
            except Exception:
                self._errands.popleft()
                raise
            self._errands.popleft()

    def _left(self):
        """Wake the call that is now the first. With nobody left, do the errands that came too late for the last driver."""
        try:
            self._places[0][0].ring()
        except IndexError:
            if self._errands:
                self.unless_driven(lambda: None)

    def _check_neighbours(self, place):
        """RuntimeError if another call in the line can never end: its thread did not survive a fork, or is this very thread."""
        _, process, thread = place
        for other in list(self._places):
            if other is place:
                continue
            if other[1] != process:
                raise RuntimeError(
                    "another thread was using this LLM when the process forked, so nothing drives it here: build another one in "
                    "the child process"
                )
            if other[2] == thread:
                raise RuntimeError("this thread is in a call on the LLM already: do not call it from a signal handler")


def _place_of(call):
    return call, os.getpid(), threading.get_ident()
