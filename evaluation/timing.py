"""Time work on a device: CUDA graph replays on a GPU, plain calls on the CPU.

Replays are queued back to back and timed by events between them, so the figure leaves out the host's launch costs, as the engine's
steady state does. Callers judge the figures and rotate data past a cache.
"""

import gc
import itertools
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass

import torch
from torch.autograd import DeviceType

from ..inference.models.memory import free_bytes

WARMUP = 3
KEPT_FREE = 0.06  # share of a GPU's memory, or of a CPU's free memory, that is always left free


@dataclass(frozen=True)
class Times:
    """Percentiles of the duration of one call, in milliseconds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples):
        ordered = sorted(samples)
        return cls(*(ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8)))

    def as_dict(self):
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}


class Repeatable:
    """Work that can be repeated: captured as a CUDA graph on a GPU, called on the CPU.

    work: a function without arguments on tensors that stay in place; num_calls: number of units in one call. A GPU runs it once
    before the capture, to compile kernels. captured: False calls it on a GPU too (for work that replays a graph itself).
    """

    def __init__(self, work, device, num_calls=1, captured=True):
        self.device, self.num_calls = torch.device(device), num_calls
        self._work = self._run = work  # kept: a graph reads the tensors that the work holds
        if captured and self.device.type == "cuda":
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream), torch.no_grad():
                work()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            torch.cuda.synchronize(self.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(self._graph, stream=stream):
                work()
            self._run = self._graph.replay

    def __call__(self):
        with torch.no_grad():
            self._run()

    def time(self, repeats=20):
        """Times of one unit, over `repeats` calls."""
        for _ in range(WARMUP):
            self()
        if self.device.type != "cuda":
            samples = []
            for _ in range(repeats):
                start = time.perf_counter()
                self()
                samples.append((time.perf_counter() - start) * 1e3 / self.num_calls)
            return Times.of(samples)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self()
            mark.record()
        torch.cuda.synchronize(self.device)
        return Times.of([a.elapsed_time(b) / self.num_calls for a, b in itertools.pairwise(marks)])

    def shares(self):
        """The share of each kernel in the time of one call.  {name: share}, greatest first

        Names are the kernels' own on a GPU, torch operators' on the CPU. Time between kernels belongs to none. While a kernel that
        started early waits for the previous one, the time belongs to the previous one.
        """
        on_gpu = self.device.type == "cuda"
        # Its library prints messages to stderr, in the middle of a table, unless the level is above all of them.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            self()
            if on_gpu:
                torch.cuda.synchronize(self.device)
        if on_gpu:
            ran = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
            spent = time_alone((event.name, event.time_range.start, event.time_range.end) for event in ran)
        else:
            spent = Counter()
            for event in profile.key_averages():
                spent[short_name(event.key)] += event.self_cpu_time_total
        total = sum(spent.values())
        return {name: round(value / total, 4) for name, value in spent.most_common() if value > 0}


def time_alone(intervals):
    """Counter of each kernel's time after the end of all kernels that started before it.  intervals of (name, start, end)"""
    spent, reached = Counter(), 0.0
    for name, start, end in sorted(intervals, key=lambda interval: interval[1:]):
        spent[short_name(name)] += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return spent


def short_name(kernel, longest=48):
    """A kernel's name without return type, template arguments and namespaces."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0]
    return name.split("::")[-1].strip()[:longest] or kernel[:longest]


def time_of(work, device, repeats=20, num_calls=1):
    """Times of one unit of `work`."""
    return Repeatable(work, device, num_calls).time(repeats)


def plannable_bytes(device):
    """Bytes that a benchmark may plan to allocate: the free bytes less the share KEPT_FREE."""
    free = free_bytes(device)
    whole = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else free
    return free - int(KEPT_FREE * whole)


def release(device):
    """Return the memory of freed graphs and tensors to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
