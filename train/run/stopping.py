"""End a training script: SIGTERM and SIGINT take effect at the next safe point, errors are one line."""

import atexit
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ...heads.storage.user_errors import exit_status
from .optimization import NonFiniteLoss


class StopSignals:
    """`requested`: the number of the first signal inside the `with` block; `arrived`: its time (time.monotonic). 0 before it.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self):
        self.requested, self.arrived = 0, 0.0

    def __enter__(self):
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def agreed(self, accelerator):
        """Whether any rank was asked to stop. All ranks call it at the same point, so that they leave together."""
        if accelerator.num_processes == 1:  # without a word to the device: the answer would wait for all its work
            return bool(self.requested)
        asked = torch.tensor([float(bool(self.requested))], device=accelerator.device)
        return accelerator.reduce(asked, "sum").item() > 0

    def _note(self, number, frame):
        if self.requested == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested, self.arrived = self.requested or number, self.arrived or time.monotonic()


def leave_with_launcher():
    """Have the kernel send this process SIGTERM when `accelerate launch` dies.

    Accelerate's launcher for a single process does not pass SIGTERM on, and no launcher can pass SIGKILL on. Without this call the
    training would continue as an orphan, beside the new process that resumes the run.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        leave_with_parent()


def leave_with_parent():
    """Have the kernel send this process SIGTERM when its parent dies, on Linux."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def leave_group():
    """End the process group, on every rank that reaches the end of its work, and let the process end without finalising Python.

    A thread of the group that asks for Python's lock after that has begun aborts the process (up to Python 3.13), and the launcher
    takes that for a failure.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        return True
    return False


def run_script(main):
    """Run `main(argv)` as a script, and exit with its status (user_errors.exit_status)."""
    had_group = False

    def work():
        nonlocal had_group
        status = main(sys.argv[1:])
        had_group = leave_group()
        return status

    def leave():
        if had_group:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    leave_with_launcher()
    atexit.register(leave)  # before `main` registers others, so that it runs after them
    status = exit_status(Path(main.__code__.co_filename).name, work, (NonFiniteLoss,))
    sys.exit(status)
