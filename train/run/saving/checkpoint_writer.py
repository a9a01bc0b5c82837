"""A thread that writes checkpoints while the training goes on, one at a time.

    writer.start(write)     # after the one before is written
    writer.wait()           # until nothing is being written; raises the thread's error

What is written was copied to the host's memory before; the thread touches nothing that the training changes, and joins no
communication between processes.
"""

import threading
import time


class CheckpointWriter:
    """One write at a time. ended: when the last one did (time.monotonic); longest: seconds that the longest one took so far."""

    def __init__(self):
        self.thread, self.error, self.ended, self.longest = None, None, 0.0, 0.0

    @property
    def is_busy(self):
        """Whether something is being written."""
        return self.thread is not None and self.thread.is_alive()

    def start(self, write):
        """Call write() in the thread, once the one before has ended, whose error is raised here."""
        self.wait()
        # A daemon: a second Ctrl-C ends the process at once, and what is half-written has no name yet.
        self.thread = threading.Thread(target=self._run, args=(write,), name="checkpoint writer", daemon=True)
        self.thread.start()

    def _run(self, write):
        begun = time.monotonic()
        try:
            write()
        except BaseException as error:  # told to the training, which then ends
            self.error = error
        self.ended = time.monotonic()
        self.longest = max(self.longest, self.ended - begun)

    def wait(self):
        """Wait for the write that is going on, and raise its error, once."""
        if self.thread is not None:
            self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error is not None:
            raise error
