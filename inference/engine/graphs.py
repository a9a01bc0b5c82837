"""CUDA graphs of the step: one per batch bucket and tree, captured once and replayed.

A bucket is a number of batch rows: 1, 2, 4, 8 ... up to max_num_seqs. Rows without a request point to the padding seat. All
graphs share one memory pool, so the results of a replay must be read before the next replay; stream order ensures that. A step
whose requests need more than a temperature has its own graphs. They are captured at first use, and again when a request needs a
table (logit_state.py) that did not exist before.
"""

import torch

from ..speculation.adaptive import buckets
from .target_scores import NO_FILTERS


class StepGraphs:
    """Runs a Step for any number of requests: through a graph of the smallest bucket that holds them, or directly.

    steps: Steps of one engine that differ in their trees, the largest first; captured: False runs every step directly (always so
    where there is no GPU).
    """

    def __init__(self, steps, max_num_seqs, captured=True):
        self.steps, self.sizes = steps, buckets(max_num_seqs)
        self.captured = captured and self.step.seats.device.type == "cuda"
        self.num_captures = 0
        self._graphs = {}  # (rows, filters, which step) -> (graph, static row numbers, StepOutput)
        self._rows = {}  # same key -> the seats that the static row numbers hold now
        self._num_tables = 0  # of LogitState, when the filtered graphs were captured
        # One pool and one stream for all graphs: memory freed by one capture can be used by the next only on the same stream.
        self._pool = self._stream = None

    def capture(self, progress=lambda sizes: sizes):
        """Make the graphs of all buckets; those with filters are made when first used. Largest first: it sizes the pool."""
        if self.captured:
            for size in progress(self.sizes[::-1]):
                for which in range(len(self.steps)):
                    self._graph(size, NO_FILTERS, which)

    @property
    def step(self):
        """The step with the largest tree."""
        return self.steps[0]

    def run(self, seats, filters, which=0):
        """Run one of the steps for the requests in `seats` (a host list).  -> StepOutput, whose first len(seats) rows are theirs"""
        if not self.captured:
            return self.steps[which](self.step.seats.on_device(seats), filters)
        size = next(size for size in self.sizes if size >= len(seats))
        if filters:
            self._forget_outdated()
        graph, rows, output = self._graph(size, filters, which)
        padded = seats + [self.step.seats.padding_seat] * (size - len(seats))
        if self._rows[size, filters, which] != padded:
            self._rows[size, filters, which] = None  # unknown, if this breaks off
            rows.copy_(torch.tensor(padded).pin_memory(), non_blocking=True)
            self._rows[size, filters, which] = padded
        graph.replay()
        return output

    def _forget_outdated(self):
        """Drop graphs captured before the newest table of the logits was made: they hold addresses, and would ignore that table."""
        now = self.step.seats.logit_state.num_tables
        if now != self._num_tables:
            if any(filters for _, filters, _ in self._graphs):
                torch.cuda.synchronize(self.step.seats.device)  # the newest replay may still be running
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}
            self._num_tables = now

    def _graph(self, size, filters, which):
        key = (size, filters, which)
        if key not in self._graphs:
            self._rows[key] = [self.step.seats.padding_seat] * size
            self._graphs[key] = self._capture(*key)
        return self._graphs[key]

    def _capture(self, size, filters, which):
        step, device = self.steps[which], self.step.seats.device
        rows = torch.full((size,), self.step.seats.padding_seat, device=device)
        # A run before the capture compiles the kernels; rows without a request change nothing.
        self._stream = stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step(rows, filters)
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = step(rows, filters)
        self._pool = self._pool or graph.pool()
        self.num_captures += 1
        return graph, rows, output
