"""Where the time of a training step goes: its phases by CUDA events, and its kernels (on a CPU its operations) by the profiler.

    phases    rows: sent to the GPU with their labels, which were read ahead (a block drafter's blocks are drawn in it);
              target: its features;  head: forward pass;  gradients: the chunks of the loss and the backward pass through the
              head;  optimiser
    kernels   of one more step, the longest first: what all calls of a name took, and how many they were

The kernels of a step may take less than its phases together: the rest is a GPU that waits.
"""

from torch.profiler import ProfilerActivity, profile

from ...evaluation.results import decimals, plain
from ...train.run.optimization import update
from .training_steps import Mark

MOST_KERNELS = 40
COLUMNS = {
    "what": ("what", 100, plain),
    "ms": ("ms", 9, decimals(2)),
    "of_step": ("of step", 7, decimals(3)),
    "calls": ("calls", 6, plain),
}


def add_parts(report, steps):
    """Measure the phases and kernels of our steps (TrainingSteps) and add them to the report as a table of their own."""
    report.table(COLUMNS)
    phases = [time_phases(steps) for _ in range(steps.settings.repeats + 1)][1:]
    found = {name: sorted(one[name] for one in phases)[len(phases) // 2] for name in phases[0]}  # medians
    whole = sum(found.values())
    for name, ms in found.items():
        report.add({"what": name, "ms": ms, "of_step": ms / whole})
    kernels = time_kernels(steps)
    for name, ms, calls in kernels[:MOST_KERNELS]:
        report.add({"what": name[:100], "ms": ms, "of_step": ms / whole, "calls": calls})
    together = sum(ms for _, ms, _ in kernels)
    report.state(f"all {len(kernels)} kernels {together:.2f} of {whole:.2f} ms", kernels_ms=together, phases_ms=whole)


def time_phases(steps):
    """{phase: milliseconds} of one step."""
    marks = [Mark(steps.device)]

    def passed(result=None):
        marks.append(Mark(steps.device))
        return result

    inputs = passed(steps.read())
    batch = passed(steps.with_features(*inputs))
    with steps.autocast:
        predicted = passed(steps.predict(batch))
        passed(steps.learn(predicted, batch))
    passed(update(steps.head, steps.optimizer, lr=0.0, max_norm=0.5))
    names = ("rows", "target", "head", "gradients", "optimiser")
    return {name: before.until(after) for name, before, after in zip(names, marks, marks[1:], strict=False)}


def time_kernels(steps):
    """[(name, milliseconds, calls)] of one step, the longest first."""
    on_gpu = steps.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        steps.step(steps.ours)
    kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [one for one in found.key_averages() if not one.is_user_annotation]  # such as the whole optimiser step
    times = [(event.key, getattr(event, kind) / 1e3, event.count) for event in events]
    return sorted((one for one in times if one[1] > 0), key=lambda one: -one[1])
