"""The engine's process: started anew (never forked, because of CUDA), told when to end, and never left without its parent.

    with EngineProcess(build) as engine:      # build: a picklable function that makes the LLM, called in the process
        info = engine.wait_until_built()
        serve(engine, ...)

Ctrl-C goes to all processes of a terminal's group, and is the parent's to answer, as SIGTERM is: the engine's process sees neither.
It ends when the parent closes the connection, and kills itself when the parent has died. Imports nothing heavy.
"""

import multiprocessing
import os
import signal
import socket
import threading
from contextlib import contextmanager
from multiprocessing import resource_tracker

from ....heads.storage.user_errors import reason_of
from ...arguments import plain_warnings
from .messages import Refused
from .wire import Closed, Wire

LEAVE = 2.0  # seconds for the process to end by itself, once it is told to


class EngineEnded(Exception):
    """The engine's process has ended before the engine was built."""


class EngineProcess:
    """connection: this side's end of the socket; exit_status: None while the process runs, negative for a signal"""

    def __init__(self, build):
        self.connection, theirs = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(target=run_engine, args=(build, theirs), name="engine")
        with theirs, _inherited_deaf():
            process.start()
        self._process, self.info = process, None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.kill()
        self.stop()

    @property
    def exit_status(self):
        return self._process.exitcode

    def wait_until_built(self):
        """-> EngineInfo. Raises what the user did wrong, as ValueError, and EngineEnded, after which stderr says more."""
        try:
            answer, *_ = Wire(self.connection).receive(wait=True)
        except Closed:
            self._process.join()
            raise EngineEnded(f"the engine could not be built: its process {ending(self.exit_status)}") from None
        if isinstance(answer, Refused):
            raise ValueError(answer.reason)
        self.info = answer
        return answer

    def wait(self, seconds):
        """Until the process has ended, at most so long."""
        self._process.join(seconds)

    def kill(self):
        """End it at once, whatever it does."""
        self._process.kill()

    def stop(self):
        """Close the connection, and wait until the process has ended."""
        self.connection.close()
        self._process.join(LEAVE)
        self._process.kill()
        self._process.join()


def run_engine(build, connection):
    """The work of the engine's process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection.set_inheritable(False)  # it must be closed when this process ends, whatever it has started
    wire = Wire(connection)
    with plain_warnings():
        try:
            llm = build()
        except (ValueError, OSError) as error:
            wire.send(Refused(reason_of(error)))
            return
        from ...frozen_heap import end_without_collecting, frozen_heap
        from .engine_info import EngineInfo
        from .engine_loop import EngineLoop, give_up

        if llm.session.ranks is not None:
            llm.session.ranks.call_when_ended(give_up)
        wire.send(EngineInfo.of(llm))
        end_without_collecting()
        with frozen_heap():
            raise SystemExit(EngineLoop(llm.session, wire).run())


def ending(status):
    """How a process ended, in words."""
    if status is None:
        return "does not answer"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _end_with_parent():
    """A step may take long, and a parent that is killed closes nothing by itself but its sentinel."""
    multiprocessing.parent_process().join()
    os._exit(1)


@contextmanager
def _inherited_deaf():
    """What is started inside inherits this mask, and never gets SIGINT and SIGTERM; here they wait for the end of the block."""
    resource_tracker.ensure_running()  # else the start of a process starts it, and unblocks the signals after that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
