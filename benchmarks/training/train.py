"""`headstart bench train`: optimiser steps on random weights of a shape, beside a plain loop, against the rate of large products.

A step is that of the trainers: the rows, read from files of packed data, the target's features, the head's predictions, loss and
gradients chunk by chunk, AdamW. A row is one document of random tokens, all supervised, for the greatest number of projections. The
plain loop takes the same features and states, computes the logits of all depths and positions at once, and uses torch's own losses
and one backward pass. Both must give the same loss and the same norm of the gradient before anything is timed.

*of product* is the rate of the step's necessary products, as a share of the rate of the library's large product. A product takes 2
operations per weight and row; a weight's gradient takes as many again, and so does an input's, if a trained layer comes before it:

    target          2 P M                       P: weights of its layers' products; no gradient
    its distribution         2 V H N                     not with hard
    Medusa          N per head, K heads         4 H^2 for the first block, 6 H^2 for each further one; 6 V H, or 4 V H on the
                                                target's lm_head, which is not trained
    EAGLE-3         M: 4 A H^2, and per step 6 times the weights of its layer; N per step: 6 Vd H
    MLP speculator  M: 4 H S for the first step, 6 S^2 for each further one; N per step: 6 V S
    block           M: 4 A H^2, and 6 times the weights of keys and values; each slot of a block: 6 times the weights of the layers;
                    N: 4 V H on the target's lm_head, 6 V r for the edge. Labels that blocks share: the distribution once

It counts no attention, norm, embedding, loss or optimiser, so a whole step cannot reach 1. Not covered: several GPUs, cached
features, several documents in a row, files that are not in the machine's memory yet.

Letters: M tokens, N labels, H hidden size, S inner size, A aux layers, V vocabulary (Vd of the draft), K heads or steps, r rank.
"""

from dataclasses import dataclass, fields

import torch

from ...evaluation.results import Report, decimals, plain
from ...inference.models.support import weight_bytes
from ...kernels.jit import on_device
from ...train.loss.losses import Loss
from ...train.run.optimization import trained
from ..floor import product_rate
from ..random_heads import empty_head
from ..shape import check_fits, config_of_shape
from .step_parts import add_parts
from .training_steps import DISAGREEMENT, BlockSteps, TrainingSteps

HEADS = {"medusa": 4, "eagle3": 7, "mlp_speculator": 4, "block": 8}  # family -> tokens ahead that are trained

COLUMNS = {
    "what": ("what", 17, plain),
    "p20": ("p20 ms", 9, decimals(2)),
    "p50": ("p50 ms", 9, decimals(2)),
    "p80": ("p80 ms", 9, decimals(2)),
    "tokens_per_second": ("tokens/s", 9, decimals(0)),
    "tflops": ("TFLOP/s", 7, decimals(1)),
    "share": ("of product", 10, decimals(3)),
    "peak_gib": ("peak GiB", 8, decimals(2)),
    "above_gib": ("above rest", 10, decimals(2)),
}


@dataclass(frozen=True)
class TrainSettings:
    """Settings of `bench train`; see `headstart bench train --help`."""

    shape: str
    head: str = "medusa"
    loss: str = "kl"
    sequence: int = 4096
    rows: int = 1
    lm_head: str = "shared"  # of Medusa heads: shared or own
    anchors: int = 512  # of block drafters: blocks of a row
    chunk_tokens: int = 1024
    repeats: int = 5
    parts: bool = False

    @property
    def depth(self):
        return HEADS[self.head]

    @property
    def shared(self):
        """Whether Medusa heads use the target's lm_head."""
        return self.head == "medusa" and self.lm_head == "shared"


def check_settings(arguments):
    """The TrainSettings that the command line asks for; ValueError for impossible ones."""
    for name in ("rows", "chunk_tokens", "repeats", "anchors"):
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {number}")
    Loss(arguments.loss)
    if arguments.lm_head and arguments.head != "medusa":
        raise ValueError(f"--lm-head {arguments.lm_head} is for Medusa heads, and --head {arguments.head} is none")
    if arguments.anchors and arguments.head != "block":
        raise ValueError(f"--anchors {arguments.anchors} is for block drafters, and --head {arguments.head} is none")
    given = {field.name: getattr(arguments, field.name) for field in fields(TrainSettings)}
    return TrainSettings(**{name: value for name, value in given.items() if value is not None})


def build_steps(settings, config, device, dtype):
    """The TrainingSteps of the settings, for a target's config."""
    return (BlockSteps if settings.head == "block" else TrainingSteps)(settings, config, device, dtype)


def bench_train(settings, device, dtype, command, output=None, commit=None):
    """Measure the target alone, our step and the plain one. Prints the table, then the JSON object, which is returned."""
    with on_device(torch.device(device)):
        return _bench_train(settings, torch.device(device), dtype, command, output, commit)


def _bench_train(settings, device, dtype, command, output, commit):
    if dtype not in DISAGREEMENT:
        raise ValueError(f"bench train takes --dtype bfloat16 or float32, got {str(dtype).removeprefix('torch.')}")
    config = config_of_shape(settings.shape)
    if not 3 <= settings.sequence <= config.max_position_embeddings:
        raise ValueError(
            f"--sequence must be from 3 to the {config.max_position_embeddings} positions of {settings.shape}, got "
            f"{settings.sequence}"
        )

    def held(config, dtype):
        """The target, and of the head weights, gradients and both moments in fp32."""
        head = empty_head(settings.head, config, settings.depth, settings.shared)
        return weight_bytes(config, dtype) + 16 * sum(parameter.numel() for parameter in trained(head))

    check_fits(settings.shape, device, dtype, num_bytes=held, what="target, head and optimiser")
    report = Report("train", COLUMNS, device, command, vars(settings), output, commit)
    run = build_steps(settings, config, device, dtype)
    rate = product_rate(device, dtype)
    target_work = run.target_operations()
    step_work = target_work + run.head_operations()
    report.state(
        f"{settings.head} on {settings.shape}, {str(dtype).removeprefix('torch.')}, loss {settings.loss}, {run.num_tokens} tokens, "
        f"on {report.head['hardware']}: large product {rate / 1e12:.4g} TFLOP/s, a step's products {step_work / 1e12:.4g} TFLOP, "
        f"{target_work / step_work:.0%} of it the target's",
        product_flops=round(rate),
        step_operations=step_work,
        target_operations=target_work,
        dtype=str(dtype).removeprefix("torch."),
    )
    need = run.estimate()
    report.state(f"memory: {need.describe(run.num_tokens)}", estimated_gib=round(need.total / 2**30, 2))
    run.check_agreement(report)
    found = {}
    for what, work, operations in (
        ("target alone", run.feed, target_work),
        ("headstart", lambda: run.step(run.ours), step_work),
        ("plain loop", lambda: run.step(run.plain), step_work),
    ):
        try:
            times, peak, rest = run.measure(work)
        except torch.OutOfMemoryError:
            report.note(f"{what}: out of memory")
            continue
        row = {"what": what, **times.as_dict(), "tokens_per_second": run.num_tokens / times.p50 * 1e3}
        row |= {"tflops": operations / times.p50 / 1e9, "share": operations / times.p50 / 1e-3 / rate}
        if peak is not None:
            row |= {"peak_gib": peak / 2**30, "above_gib": (peak - rest) / 2**30}
        report.add(row)
        found[what] = times.p50
    if len(found) == 3:
        faster = found["plain loop"] / found["headstart"]
        report.state(f"\nheadstart is {faster:.2f} times as fast as the plain loop", faster=round(faster, 4))
    if settings.parts:
        add_parts(report, run)
    return report.finish()
