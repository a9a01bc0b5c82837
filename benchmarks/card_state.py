"""The clock and the power of a GPU under some work, and their limits, as nvidia-smi reads them.

A GPU lowers its clock until its power is within its limit, so the limit decides the speed of a busy one. The work is repeated for
this alone: what the queries cost belongs to no figure.
"""

import shutil
import subprocess
import time
from contextlib import suppress
from statistics import median

import torch

VALUES = {  # what nvidia-smi calls them
    "clock": "clocks.sm",  # MHz
    "watts": "power.draw.instant",
    "max_clock": "clocks.max.sm",
    "max_watts": "power.limit",
}
SECONDS = 3.0  # of the work
SETTLED = 1.0  # seconds until the power has settled
EVERY_MS = 100


def state_under(work, device):
    """Repeat `work`, a function that launches something, for SECONDS.  -> medians of VALUES; {} where they are not known"""
    command = _command(device)
    if command is None:
        return {}
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        process, said = subprocess.Popen(command, **pipes), ""
    except OSError:
        return {}
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
    *whole_lines, _ = said.split("\n")
    found = [numbers for numbers in map(_numbers, whole_lines) if numbers]
    found = found[int(SETTLED * 1000 / EVERY_MS) :]
    return dict(zip(VALUES, map(median, zip(*found))))


def state_text(state):
    """` at 1485 MHz and 708 W (limits: 1980 MHz, 700 W)`; nothing where that is not known."""
    text = " at {clock:.0f} MHz and {watts:.0f} W (limits: {max_clock:.0f} MHz, {max_watts:.0f} W)"
    return text.format(**state) if state else ""


def _command(device):
    """The command that prints a line of VALUES again and again; None where nvidia-smi cannot."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip or not shutil.which("nvidia-smi"):
        return None
    card = torch.cuda.get_device_properties(device).uuid  # nvidia-smi's numbers do not follow CUDA_VISIBLE_DEVICES
    query, form = f"--query-gpu={','.join(VALUES.values())}", "--format=csv,noheader,nounits"
    return ["nvidia-smi", f"--id=GPU-{card}", query, form, f"--loop-ms={EVERY_MS}"]


def _numbers(line):
    """The numbers of one line, in the order of VALUES; None of a line that says something else."""
    try:
        found = [float(part) for part in line.split(",")]
    except ValueError:
        return None
    return found if len(found) == len(VALUES) else None
