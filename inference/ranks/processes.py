"""Processes of the other ranks: started anew (never forked, because of CUDA), watched, and never left alone.

    ranks = RankProcesses(size)        # ranks 1 to size - 1, each `python -m headstart.inference.ranks.worker`
    with ranks.starting():
        ranks.begin(arguments)         # they build the same LLM
        ...
    ranks.send(message)                # to all of them
    ranks.compare(digest)              # with what each of them sends

This process is rank 0. When a rank ends, all others are ended, and whoever uses the group next is told why (RanksEnded). The
ranks end when this process closes their connection, is gone, or drops the group; Ctrl-C goes to this process alone.
"""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, field
from multiprocessing import Pipe

from ..models.transport import RankLost

WORKER = "headstart.inference.ranks.worker"
LEAVE = 2.0  # seconds for a rank to end by itself, once it is told to
NOTICE = 5.0  # seconds within which the end of a process is noticed
LOST = 3  # exit status of a rank that ended because it could not reach another
READY = "ready"  # a worker's first message


class RanksEnded(RuntimeError):
    """A rank has ended, and with it the group: the LLM must be built anew."""


@dataclass(frozen=True)
class Begin:
    """The first message to a rank.  arguments: of its LLM; folder: where the ranks meet"""

    rank: int
    size: int
    folder: str
    num_threads: int
    arguments: dict


@dataclass(frozen=True)
class Failed:
    """A rank's last message.  is_users: whether the user can mend it (ValueError)"""

    reason: str
    is_users: bool


def send(connection, message):
    """Send one message. Plain pickle: torch's own would send tensors as handles of shared memory."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection):
    """Wait for one message. Raises EOFError or ConnectionError when the other side has gone."""
    return pickle.loads(connection.recv_bytes())


def start_worker(connection):
    """Start a rank's process, which talks over this end of a connection.  -> subprocess.Popen"""
    command = [sys.executable, "-P", "-m", WORKER, str(connection.fileno()), str(os.getpid())]
    path = os.pathsep.join(filter(None, sys.path))  # what this process can import, it can
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C goes to the group of the terminal, and is this process's to answer
    )


@dataclass
class _Group:
    """What the watching threads and the end of the group know. It does not hold the RankProcesses."""

    folder: str
    processes: list = field(default_factory=list)
    connections: list = field(default_factory=list)
    ended: list = field(
        default_factory=list
    )  # (rank, exit status) of ranks that ended by themselves, the first one first
    closing: bool = False
    on_end: object = None  # called once a rank has ended by itself
    stop: object = lambda: None  # lets kernels of this process that wait for another rank end
    lock: object = field(default_factory=threading.Lock)

    def watch(self, rank, process):
        status = process.wait()
        with self.lock:
            if self.closing:
                return
            self.ended.append((rank, status))
        if status == LOST:
            time.sleep(LEAVE / 10)  # the rank that it lost is noticed meanwhile
        self.kill()
        if self.on_end:
            self.on_end()

    def kill(self):
        with self.lock:
            self.closing = True
        self.stop()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def close(self):
        """Let the ranks end, and wait for it."""
        with self.lock:
            self.closing = True
        for connection in self.connections:
            connection.close()
        limit = time.monotonic() + LEAVE
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0.01))
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class RankProcesses:
    """size: of the group, this process included. Returns when all processes can be told what to build."""

    def __init__(self, size):
        self.size, self._failure, self._lock = size, None, threading.Lock()
        self._failed = {}  # rank: its last message, where that was received in the place of another
        self._group = group = _Group(tempfile.mkdtemp(prefix="headstart-ranks-"))
        self._finalizer = weakref.finalize(self, group.close)
        for _ in range(1, size):
            ours, theirs = Pipe()
            group.connections.append(ours)
            with theirs:
                group.processes.append(start_worker(theirs))
        for rank, process in enumerate(group.processes, 1):
            threading.Thread(target=group.watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    @property
    def folder(self):
        """Where the ranks meet."""
        return self._group.folder

    @property
    def pids(self):
        """Process ids of ranks 1 and on."""
        return [process.pid for process in self._group.processes]

    def have_ended(self):
        """Whether a rank has ended."""
        return bool(self._group.ended)

    def begin(self, arguments, num_threads):
        """Once all processes run, let them build an LLM of these arguments."""
        try:
            for connection in self._group.connections:
                assert receive(connection) == READY
        except (EOFError, ConnectionError) as error:
            raise self.fault() from error
        for rank, connection in enumerate(self._group.connections, 1):
            self._send(connection, Begin(rank, self.size, self.folder, num_threads, arguments))

    def send(self, message):
        """To all ranks. Raises RanksEnded."""
        for connection in self._group.connections:
            self._send(connection, message)

    def compare(self, digest):
        """Wait for each rank's digest of its last step. RanksEnded if one differs from this one's, or a rank has ended."""
        other = []
        for rank, connection in enumerate(self._group.connections, 1):
            try:
                said = receive(connection)
            except (EOFError, OSError) as error:
                raise self.fault() from error
            if isinstance(said, Failed):
                self._failed[rank] = said
                raise self.fault()
            if said != digest:
                other.append(rank)
        if other:
            ranks = f"rank{'s' * (len(other) > 1)} {', '.join(map(str, other))} of {self.size}"
            self._failure = RanksEnded(
                f"{ranks} computed other tokens or hidden states than rank 0, which must never happen: a fault of Headstart, or "
                "of a GPU. All ranks were ended: build the LLM anew, and please report it with its arguments"
            )
            self.end()
            raise self._failure

    def check(self):
        """RanksEnded if the group has ended."""
        if self._failure or self._group.ended:
            raise self.fault()

    def stop_by(self, stop):
        """Call stop() when a rank ends, in any thread; at once if one has: kernels of this process may wait for it."""
        self._group.stop = stop
        if self._group.ended:
            stop()

    def call_when_ended(self, told):
        """Call told(error) in another thread, once a rank has ended by itself, whatever this process does then."""
        self._group.on_end = lambda: told(self.fault())
        if self._group.ended:
            self._group.on_end()

    def fault(self):
        """The error to raise where the group has ended: RanksEnded, or ValueError for what the user can mend. Ends all ranks."""
        with self._lock:
            return self._fault()

    def _fault(self):
        if self._failure is None:
            limit = time.monotonic() + NOTICE
            while not self._group.ended and time.monotonic() < limit:
                time.sleep(0.02)
            time.sleep(0.02)
            # A rank that lost another is not the cause.
            ended = sorted(self._group.ended, key=lambda end: end[1] == LOST)
            self._failure = self._explained(*ended[0]) if ended else RanksEnded("a rank does not answer")
            self.end()
        return self._failure

    @contextlib.contextmanager
    def starting(self):
        """Around what makes use of the group for the first time: an error inside ends all ranks."""
        try:
            yield
            shutil.rmtree(self.folder, ignore_errors=True)  # all have met
        except BaseException as error:
            follows = isinstance(error, RankLost) or (isinstance(error, Exception) and self.have_ended())
            if follows:  # from the end of a rank
                raise self.fault() from error
            self.end()
            raise

    def end(self):
        """End all ranks at once, whatever they do."""
        self._failure = self._failure or RanksEnded("the ranks of this LLM have been ended: build it anew")
        self._group.kill()
        self._finalizer()

    def _send(self, connection, message):
        try:
            send(connection, message)
        except (OSError, ValueError) as error:  # broken, or closed
            raise self.fault() from error

    def _explained(self, rank, status):
        name, connection = f"rank {rank} of {self.size}", self._group.connections[rank - 1]
        failed = self._failed.get(rank)
        with contextlib.suppress(EOFError, OSError):
            while failed is None and connection.poll():
                message = receive(connection)
                failed = message if isinstance(message, Failed) else None
        if failed is not None and failed.is_users:
            return ValueError(failed.reason)
        if failed is not None:
            return RanksEnded(f"{name} failed: {failed.reason}. The other ranks were ended: build the LLM anew")
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return RanksEnded(f"{name} {how}, and the other ranks with it: build the LLM anew")
