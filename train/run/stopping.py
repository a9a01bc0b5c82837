"""How a training script ends: SIGTERM and SIGINT at the next safe point instead of at once, errors in one line."""

import ctypes
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ...heads.storage.user_errors import exit_status
from .optimization import NonFiniteLoss


class StopSignals:
    """`requested` is the number of the first signal that arrived inside the `with` block, else 0.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self):
        self.requested = 0

    def __enter__(self):
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def agreed(self, accelerator):
        """Was any rank asked to stop? Called by all ranks at the same point, so that they leave together."""
        asked = torch.tensor([float(bool(self.requested))], device=accelerator.device)
        return accelerator.reduce(asked, "sum").item() > 0

    def _note(self, number, frame):
        if self.requested == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = self.requested or number


def leave_with_launcher():
    """Have the kernel send this process SIGTERM when `accelerate launch` dies.

    Its launcher for a single process does not pass SIGTERM on, and none can pass on SIGKILL: without this, the training would go on
    as an orphan, beside the one that is started to go on with the run.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if launched and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def leave_group():
    """End the group of processes, on every rank that got to its end.

    Left to the interpreter's exit, a thread of the group now and then aborts the process, which the launcher takes for a failure.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def run_script(main):
    """Run `main(argv)` as the program that was started, and leave with its exit status (user_errors.exit_status)."""

    def work():
        status = main(sys.argv[1:])
        leave_group()
        return status

    leave_with_launcher()
    sys.exit(exit_status(Path(main.__code__.co_filename).name, work, (NonFiniteLoss,)))
