"""The clock and the power of a GPU while a benchmark runs, as nvidia-smi reads them.

At its power limit a GPU lowers its clock until the power fits, so a figure of a full card is one of that limit.
"""

import shutil
import subprocess
import threading
import time
from statistics import median

import torch

QUERY = "clocks.sm,power.draw.instant"  # MHz, W
LIMITS = "clocks.max.sm,power.limit"
EVERY_MS = 100
UNKNOWN = {"clock": None, "watts": None}


def card_command(device, query, *more):
    """The command that prints such values of a device as numbers, one line each time; None where nvidia-smi does not know it."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip or not shutil.which("nvidia-smi"):
        return None
    card = torch.cuda.get_device_properties(device).uuid  # nvidia-smi's numbers do not follow CUDA_VISIBLE_DEVICES
    return ["nvidia-smi", f"--id=GPU-{card}", f"--query-gpu={query}", "--format=csv,noheader,nounits", *more]


def read_values(line):
    """The numbers of one line of nvidia-smi: (MHz, W), or None for a line that says something else."""
    try:
        clock, watts = map(float, line.split(","))
    except ValueError:
        return None
    return clock, watts


def card_limits(device):
    """(highest clock in MHz, power limit in W) of a GPU; None where they are not known."""
    command = card_command(device, LIMITS)
    if command is None:
        return None
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_values(found.stdout)


class CardState:
    """Samples of a device's clock and power, taken by a process beside, ten a second while this context lasts; none of a CPU."""

    def __init__(self, device):
        self._command = card_command(device, QUERY, f"--loop-ms={EVERY_MS}")
        self._process, self._samples = None, []

    def __enter__(self):
        if self._command is not None:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, name="card state", daemon=True).start()
        return self

    def __exit__(self, *_):
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self):
        for line in self._process.stdout:
            values = read_values(line)
            if values is not None:
                self._samples.append((time.perf_counter(), *values))

    def between(self, begin, end):
        """{"clock": MHz, "watts": W}: medians of the samples between two times of time.perf_counter; None where there are none."""
        found = [values for when, *values in list(self._samples) if begin <= when <= end]
        return {name: median(values) for name, values in zip(UNKNOWN, zip(*found))} if found else dict(UNKNOWN)
