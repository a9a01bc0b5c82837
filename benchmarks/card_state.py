"""The clock and the power of a GPU under some work, as nvidia-smi reads them.

A GPU lowers its clock until its power is within its limit, so the limit decides the speed of a busy one. The work is repeated for
this alone: what the queries cost belongs to no figure.
"""

import shutil
import subprocess
import time
from contextlib import suppress
from statistics import median

import torch

SECONDS = 3.0  # of the work
SETTLED = 1.0  # seconds until the power has settled
EVERY_MS = 100
LIMITS = "clocks.max.sm,power.limit"  # MHz, W
STATE = "clocks.sm,power.draw.instant"
UNKNOWN = {"clock": None, "watts": None}


def card_limits(device):
    """{"clock": the highest in MHz, "watts": the power limit} of a GPU; None where nvidia-smi does not say them."""
    command = _command(device, LIMITS)
    try:
        found = command and subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        found = None
    values = found and _values(found)
    return values and dict(zip(UNKNOWN, values))


def state_under(work, device):
    """Repeat `work`, a function that launches something, for SECONDS.  -> {"clock": MHz, "watts": W}, medians, or UNKNOWN"""
    command = _command(device, STATE, f"--loop-ms={EVERY_MS}")
    if command is None:
        return dict(UNKNOWN)
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        process, said = subprocess.Popen(command, **pipes), ""
    except OSError:
        return dict(UNKNOWN)
    try:
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            for _ in range(10):
                work()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver is left alone
            said, _ = process.communicate(timeout=20)
    whole_lines = said.split("\n")[:-1]
    found = [values for values in map(_values, whole_lines) if values]
    found = found[int(SETTLED * 1000 / EVERY_MS) :]
    return dict(zip(UNKNOWN, map(median, zip(*found)))) if found else dict(UNKNOWN)


def state_text(state):
    """` at 1485 MHz and 708 W`, or nothing where that is not known."""
    return "" if state["watts"] is None else f" at {state['clock']:.0f} MHz and {state['watts']:.0f} W"


def _command(device, query, *more):
    """The command that prints such values of a device, a line each time; None where nvidia-smi cannot."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip or not shutil.which("nvidia-smi"):
        return None
    card = torch.cuda.get_device_properties(device).uuid  # nvidia-smi's numbers do not follow CUDA_VISIBLE_DEVICES
    return ["nvidia-smi", f"--id=GPU-{card}", f"--query-gpu={query}", "--format=csv,noheader,nounits", *more]


def _values(line):
    """The numbers of one line of nvidia-smi: (MHz, W), or None for a line that says something else."""
    try:
        clock, watts = map(float, line.split(","))
    except ValueError:
        return None
    return clock, watts
