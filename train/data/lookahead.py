"""The rows that a rank is fed, micro-batch by micro-batch, the next one being made ready while this one is trained on.

With AHEAD, which is off, the target's next forward runs on a GPU on a stream of its own, beside the head's forward and backward; it
fills what those leave idle, and takes memory for one more micro-batch of features. It changes no bit. On the CPU nothing is made
ahead.

    batches = look_ahead(make, deal_rows(...), device);    next(batches)
"""

import torch

from .rows import rows_of_step

AHEAD = False  # everything on one stream: ahead gains 0.5 % at an 8B shape and nothing at a small one (docs/log.md)


def deal_rows(steps, num_rows, recipe, accelerator):
    """Yields what this rank is fed in the optimiser steps `steps` (a range), in order: rows (int64 array [B]) per micro-batch."""
    world, rank, size = accelerator.num_processes, accelerator.process_index, recipe.batch_rows
    for step in steps:
        rows = rows_of_step(step, size * recipe.accumulate * world, num_rows, recipe.seed)
        for micro in range(recipe.accumulate):
            first = (micro * world + rank) * size
            yield rows[first : first + size]


def look_ahead(make, order, device):
    """Yields (index, *make(index)) for every index of the iterable `order`.

    make: returns tensors on `device`, and reads nothing there that changes while the caller computes.
    """
    if device.type != "cuda" or not AHEAD:
        for index in order:
            yield index, *make(index)
        return
    side, waiting = torch.cuda.Stream(device), None
    side.wait_stream(torch.cuda.current_stream(device))  # what `make` reads may still be on its way
    for index in order:
        with torch.cuda.stream(side):
            tensors = make(index)
            ready = side.record_event()
        if waiting:
            yield _hand_over(*waiting)
        waiting = index, tensors, ready
    if waiting:
        yield _hand_over(*waiting)


def _hand_over(index, tensors, ready):
    """To the stream that is current, which waits for them; their memory stays theirs until it has passed what uses them."""
    current = torch.cuda.current_stream(tensors[0].device)
    current.wait_event(ready)
    for tensor in tensors:
        tensor.record_stream(current)
    return index, *tensors
