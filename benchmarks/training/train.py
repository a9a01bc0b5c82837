"""`headstart bench train`: optimiser steps on random weights of a shape, beside a plain loop, against the rate of large products.

A step is that of the trainers: the target's features, the head's predictions, loss and gradients chunk by chunk, AdamW. A row is
one document of random tokens, all supervised, for the greatest number of projections. The plain loop takes the same features and
predictions, computes the logits of all depths and positions at once, and uses torch's own losses and one backward pass. Both must
give the same loss and the same norm of the gradient before anything is timed.

*of product* is the rate of the step's necessary products, as a share of the rate of the library's large product. A product takes 2
operations per weight and row; a weight's gradient takes as many again, and so does an input's, if a trained layer comes before it:

    target          2 P M                       P: weights of its layers' products; no gradient
    its distribution         2 V H N                     not with hard
    Medusa          N per head, K heads         4 H^2 for the first block, 6 H^2 for each further one; 6 V H, or 4 V H on the
                                                target's lm_head, which is not trained
    EAGLE-3         M: 4 A H^2, and per step 6 times the weights of its layer; N per step: 6 Vd H
    MLP speculator  M: 4 H S for the first step, 6 S^2 for each further one; N per step: 6 V S

It counts no attention, norm, embedding, loss or optimiser, so a whole step cannot reach 1. Not covered: several GPUs, cached
features, documents packed into rows.

Letters: M tokens, N labels, H hidden size, S inner size, A aux layers, V vocabulary (Vd of the draft), K heads or steps.
"""

import time
from dataclasses import dataclass, fields
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ...evaluation.results import Report, decimals, plain
from ...evaluation.timing import Times, release
from ...inference.models.support import weight_bytes
from ...kernels.jit import on_device
from ...train.loss.distillation import Objective, accumulate_gradients, find_labels, summarize
from ...train.loss.losses import Loss
from ...train.run.optimization import build_optimizer, trained, update
from ...train.teacher.features import FrozenTarget
from ..floor import product_rate
from ..ops.losses import torch_losses
from ..random_heads import empty_head, random_head
from ..shape import check_fits, config_of_shape

HEADS = {"medusa": 4, "eagle3": 7, "mlp_speculator": 4}  # family -> number of heads or steps that are trained
WARMUP = 2
DISAGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # of loss and norm; an error in the loss would be far larger

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
    chunk_tokens: int = 1024
    repeats: int = 5

    @property
    def depth(self):
        return HEADS[self.head]


def check_settings(arguments):
    """The TrainSettings that the command line asks for; ValueError for impossible ones."""
    for name in ("rows", "chunk_tokens", "repeats"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    Loss(arguments.loss)
    if arguments.lm_head and arguments.head != "medusa":
        raise ValueError(f"--lm-head {arguments.lm_head} is for Medusa heads, and --head {arguments.head} is none")
    given = {field.name: getattr(arguments, field.name) for field in fields(TrainSettings)}
    return TrainSettings(**given | {"lm_head": arguments.lm_head or TrainSettings.lm_head})


def bench_train(settings, device, dtype, command, output=None, commit=None):
    """Measure the target alone, our step and the plain one. Prints the table, then the JSON object, which is returned."""
    with on_device(torch.device(device)):
        return _bench_train(settings, torch.device(device), dtype, command, output, commit)


def _bench_train(settings, device, dtype, command, output, commit):
    shared = settings.head == "medusa" and settings.lm_head == "shared"
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
        head = empty_head(settings.head, config, settings.depth, shared)
        return weight_bytes(config, dtype) + 16 * sum(parameter.numel() for parameter in trained(head))

    check_fits(settings.shape, device, dtype, num_bytes=held, what="target, head and optimiser")
    report = Report("train", COLUMNS, device, command, vars(settings), output, commit)
    run = TrainBench(settings, config, device, dtype, shared)
    rate = product_rate(device, dtype)
    target_work = target_operations(run.target, run.num_tokens)
    step_work = target_work + head_operations(run.target, run.head, settings, run.num_tokens, run.num_labels)
    report.state(
        f"{settings.head} on {settings.shape}, {str(dtype).removeprefix('torch.')}, loss {settings.loss}, {run.num_tokens} tokens, "
        f"on {report.head['hardware']}: large product {rate / 1e12:.4g} TFLOP/s, a step's products {step_work / 1e12:.4g} TFLOP, "
        f"{target_work / step_work:.0%} of it the target's",
        product_flops=round(rate),
        step_operations=step_work,
        target_operations=target_work,
        dtype=str(dtype).removeprefix("torch."),
    )
    run.check_agreement(report)
    found = {}
    for what, work, operations in (
        ("target alone", run.features, target_work),
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
    return report.finish()


class TrainBench:
    """A random target, a random head in training, a batch of rows, and the two kinds of steps on them."""

    def __init__(self, settings, config, device, dtype, shared):
        torch.manual_seed(0)
        self.settings, self.device, self.dtype = settings, device, dtype
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        self.target = FrozenTarget(model)
        for_head = SimpleNamespace(
            dtype=torch.float32, device=device, embedding=self.target.embedding, vocab_size=self.target.vocab_size
        )
        self.head = random_head(settings.head, config, for_head, settings.depth, shared).train()
        for name, parameter in self.head.named_parameters():
            parameter.requires_grad_(not name.startswith("embed_tokens"))
        self.optimizer = build_optimizer(self.head, 0.0, 0.9, 0.95)
        shape = (settings.rows, settings.sequence)
        input_ids = torch.randint(config.vocab_size, shape, device=device)
        position_ids = torch.arange(settings.sequence, device=device).expand(shape)
        document_ids = torch.arange(settings.rows, device=device)[:, None].expand(shape).contiguous()
        self.batch = (input_ids, position_ids, document_ids)
        self.labels = find_labels(input_ids, document_ids, torch.ones_like(input_ids, dtype=torch.bool), settings.depth)
        self.num_tokens, self.num_labels = input_ids.numel(), len(self.labels.positions)
        objective = Objective(Loss(settings.loss), [0.8**k for k in range(settings.depth)])
        self.objective = objective.at([0.3] * settings.depth)  # rates for lk's weight of kl

    def features(self):
        """[B, T, (1 + A) H]"""
        return self.target.features(*self.batch, self.head.aux_layers)

    def predict(self, features):
        """The head's Predictions, and the target's last states [M, H]."""
        last, read = self.target.split(features, self.head.aux_layers)
        return self.head.predict(read, *self.batch, self.target.lm_head.weight, self.settings.depth), last

    def ours(self, features):
        """Gradients by the trainers' own code.  -> the loss"""
        predictions, last = self.predict(features)
        totals = accumulate_gradients(
            predictions,
            last,
            self.labels,
            lm_head=self.target.lm_head,
            objective=self.objective,
            num_labels=self.num_labels,
            chunk_tokens=self.settings.chunk_tokens,
        )
        return summarize(totals, self.objective, self.num_labels)["loss"]

    def plain(self, features):
        """Gradients by logits of all depths and positions, torch's losses and one backward pass.  -> the loss"""
        predictions, last = self.predict(features)
        positions, tokens, valid, log_p = self.labels.positions, self.labels.tokens, self.labels.valid, None
        draft_ids = predictions.draft_ids
        if self.settings.loss != "hard":
            with torch.no_grad():
                log_p = self.target.lm_head(last[positions - 1]).float().log_softmax(-1)  # [N, V]
                log_p = log_p if draft_ids is None else log_p[:, draft_ids]
        if draft_ids is not None:
            places = torch.full((self.target.vocab_size,), -1, device=self.device)
            places[draft_ids] = torch.arange(len(draft_ids), device=self.device)
            tokens = places[tokens]
            if self.settings.loss == "hard":
                valid, tokens = valid & (tokens >= 0), tokens.clamp_min(0)
        total = 0.0
        for k, weight in enumerate(self.objective.weights):
            logits = predictions.logits(predictions.states[k][(positions - 2 - k).clamp_min(0)], k)
            losses = torch_losses(logits, tokens, log_p, self.objective.loss.formula, self.objective.kl_weight(k))
            total = total + weight * torch.where(valid[k], losses, 0).sum()
        loss = total / self.num_labels
        loss.backward()
        return loss.item()

    def gradients(self, way):
        features = self.features()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return way(features)

    def step(self, way):
        """A whole optimiser step, with a learning rate of zero, so that all steps are equal."""
        self.gradients(way)
        update(self.head, self.optimizer, lr=0.0, max_norm=0.5)

    def check_agreement(self, report):
        """RuntimeError if loss or gradient of the two kinds differ: their times would mean nothing."""
        found = []
        for way in (self.ours, self.plain):
            try:
                loss = self.gradients(way)
            except torch.OutOfMemoryError:
                report.note("the plain loop runs out of memory: nothing to compare with")
            else:
                norm = nn.utils.get_total_norm([p.grad for p in trained(self.head) if p.grad is not None])
                found.append(torch.tensor([loss, norm.item()], dtype=torch.float64))
            self.optimizer.zero_grad()
            release(self.device)
        if len(found) == 2 and not torch.allclose(*found, rtol=DISAGREEMENT[self.dtype], atol=0):
            raise RuntimeError(f"loss and norm of the gradient differ: {found[0].tolist()} and {found[1].tolist()}")

    def measure(self, work):
        """(Times of one call, peak bytes, bytes at rest); the bytes are None on a CPU."""
        on_gpu = self.device.type == "cuda"
        release(self.device)
        for _ in range(WARMUP):
            work()
        rest = None
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            rest = torch.cuda.memory_allocated(self.device)
        samples = []
        for _ in range(self.settings.repeats):
            start = time.perf_counter()
            work()
            if on_gpu:
                torch.cuda.synchronize(self.device)
            samples.append((time.perf_counter() - start) * 1e3)
        return Times.of(samples), torch.cuda.max_memory_allocated(self.device) if on_gpu else None, rest


def target_operations(target, num_tokens):
    """Operations of the products of the target's layers over `num_tokens` tokens."""
    layers = target.check_layers(())
    weights = sum(module.weight.numel() for module in layers.modules() if isinstance(module, nn.Linear))
    return 2 * weights * num_tokens


def head_operations(target, head, settings, num_tokens, num_labels):
    """Operations of the products of the target's distribution and of a head's forward and backward pass: the module's table."""
    width, vocab, depth = target.hidden_size, target.vocab_size, settings.depth
    distribution = 0 if settings.loss == "hard" else 2 * vocab * width * num_labels
    if settings.head == "medusa":
        blocks = (6 * head.config.num_layers - 2) * width**2
        projection = (4 if head.config.shared_lm_head else 6) * vocab * width
        return distribution + depth * num_labels * (blocks + projection)
    if settings.head == "eagle3":
        layer = sum(module.weight.numel() for module in head.midlayer.modules() if isinstance(module, nn.Linear))
        per_token = 4 * head.fc.weight.numel() + 6 * depth * layer
        return distribution + num_tokens * per_token + 6 * depth * num_labels * head.lm_head.weight.numel()
    inner = head.config.inner_size
    per_token = 4 * width * inner + 6 * (depth - 1) * inner**2
    return distribution + num_tokens * per_token + 6 * depth * num_labels * vocab * inner
