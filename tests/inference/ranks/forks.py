"""Workers as forks of this process: the same code, without a start of Python."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest
import torch

from headstart.inference.ranks import processes
from headstart.inference.ranks.worker import run_worker


class Fork:
    """A forked process with the methods of subprocess.Popen that the group uses."""

    def __init__(self, pid):
        self.pid, self._status, self._lock = pid, None, threading.Lock()

    def wait(self, timeout=None):
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._status is None:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self._status = os.waitstatus_to_exitcode(status) if pid else None
                if self._status is not None:
                    return self._status
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.005)

    def kill(self):
        with self._lock:
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def forked_workers(monkeypatch):
    """Ranks of LLMs that a test, or what it calls, makes on the CPU are forks.

    Products take one thread here, too: in forks others do not live on.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(processes, "start_worker", start_fork)
    yield
    torch.set_num_threads(before)


def start_fork(connection):
    """In the place of processes.start_worker."""
    pid = os.fork()
    if pid:
        return Fork(pid)
    # Groups of earlier LLMs that wait to be collected: their threads are not here, and their ends would wait for them, or worse.
    gc.freeze()
    status = 70
    try:
        sys.stdout = sys.stderr = os.fdopen(2, "w")  # those of pytest are files that are closed next
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Else it would hold this end's other side, and those of ranks before it, and never see them closed.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, 4096)
        status = run_worker(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
