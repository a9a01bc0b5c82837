"""A dry run: all checks of a run and two of its steps, without training or a run folder. It tells what the run would take."""

import time

import torch

from ...inference.models.memory import in_gib
from ..run.tracking import peak_memory


class NoRun:
    """Stands for the run folder in a dry run: nothing is done yet, and nothing is written."""

    step = 0


def rehearse(steps, *, num_steps, rows_per_step, row_length, device, note):
    """Yield `steps`, two whose optimiser stands still, and tell what the second took: the first compiles.

    num_steps: of the run; rows_per_step, row_length: what each is fed; note(text): tells the user
    """
    for step in steps:
        begun = time.perf_counter()
        yield step
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
    speed = rows_per_step * row_length / seconds
    note(
        f"dry run: a step of {rows_per_step} rows took {seconds:.2f} s, {speed:,.0f} tokens/s with padding, and at most "
        f"{in_gib(2**30 * peak_memory(device))} so far (without the optimiser's state)"
    )
    note(
        f"dry run: {num_steps} steps would take about {describe_seconds(num_steps * seconds)}, beside measuring and saving. "
        "Nothing was trained or written"
    )


def describe_seconds(seconds):
    """ "3 s", "5 min", "2.1 h" or "1.5 days"."""
    for unit, size, digits in (("days", 86400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
