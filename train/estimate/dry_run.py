"""A dry run: all checks of a run and two of its steps, without training or a run folder. It tells what the run would take."""

import time

import torch

from ...inference.models.memory import in_gib
from ..run.tracking import peak_memory


class NoRun:
    """Stands for the run folder in a dry run: nothing is done yet, and nothing is written."""

    step = 0


def rehearse(steps, *, num_steps, rows_per_step, row_length, device, note, cached=0, compute=None):
    """Yield `steps`, two whose optimiser stands still, and tell what the second took: the first compiles.

    num_steps: of the run; rows_per_step, row_length: what each is fed; note(text): tells the user; cached: rows whose features the
    run keeps, 0 if it keeps none; compute(step): computes a step's features alone
    """

    def timed(begun):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    for step in steps:
        begun = time.perf_counter()
        yield step
        seconds = timed(begun)
    speed = rows_per_step * row_length / seconds
    note(
        f"dry run: a step of {rows_per_step} rows took {seconds:.2f} s, {speed:,.0f} tokens/s with padding, and at most "
        f"{in_gib(2**30 * peak_memory(device))} so far (without the optimiser's state)"
    )
    before, of_head = "", seconds
    if cached:
        begun = time.perf_counter()
        compute(step)
        of_target = timed(begun)
        of_head = max(seconds - of_target, 0.0)
        whole = describe_seconds(of_target * cached / rows_per_step)
        before = f"the features of {cached:,} rows would take about {whole} once, unless they are kept already; then "
    note(
        f"dry run: {before}{num_steps} steps would take about {describe_seconds(num_steps * of_head)}, beside measuring and "
        "saving. Nothing was trained or written"
    )


def describe_seconds(seconds):
    """ "3 s", "5 min", "2.1 h" or "1.5 days"."""
    for unit, size, digits in (("days", 86400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
