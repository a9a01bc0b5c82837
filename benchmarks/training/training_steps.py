"""The optimiser steps that `bench train` measures: the trainers' own, and a plain loop's; with the operations that they need.

Not here: settings, the report (train.py).

Letters: B rows, T tokens per row, M = B T, N labels, R blocks per row, K depths, H hidden size, V vocabulary.
"""

import itertools
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ...evaluation.timing import Times, release
from ...heads.head import cast_lm_head
from ...train.data.packed.documents import Documents
from ...train.data.packed.packing import lay_out
from ...train.data.packed.row_reader import RowReader
from ...train.data.packed.store import PARTS
from ...train.estimate.memory import estimate_memory
from ...train.loss.blocks import BlockObjective, accumulate_block_gradients, draw_blocks, summarize_blocks
from ...train.loss.distillation import Objective, accumulate_gradients, summarize
from ...train.loss.losses import Loss
from ...train.run.loop import Batch
from ...train.run.optimization import build_optimizer, trained, update
from ...train.teacher.features import FrozenTarget
from ..ops.losses import torch_losses
from ..random_heads import random_head

WARMUP = 2
DISAGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # of loss and norm; an error in the loss would be far larger


def packed_rows(settings, vocab_size, folder):
    """DocumentRows of one document of random tokens each, all supervised, mapped from files in `folder` as those of training."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=(settings.rows, settings.sequence))
    made = Documents.of((row, [True] * len(row)) for row in tokens.tolist())
    for name in PARTS:
        np.save(Path(folder, f"{name}.npy"), getattr(made, name))
    return lay_out(
        Documents(*(np.load(Path(folder, f"{name}.npy"), mmap_mode="r") for name in PARTS)), settings.sequence
    )


class Mark:
    """A moment in the GPU's stream, or on a CPU now."""

    def __init__(self, device):
        self.event, self.time = None, time.perf_counter()
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def until(self, other):
        """Milliseconds to another."""
        if self.event is None:
            return (other.time - self.time) * 1e3
        other.event.synchronize()
        return self.event.elapsed_time(other.event)


class TrainingSteps:
    """A random target, a random head in training, rows in files, and the two kinds of steps on them.

    ours(batch), plain(batch): the two ways to the gradients; num_tokens, num_labels: of a step
    """

    kind_of_objective = Objective
    every = 1  # it predicts after one of so many tokens

    def __init__(self, settings, config, device, dtype):
        torch.manual_seed(0)
        self.settings, self.device, self.dtype = settings, device, dtype
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        self.target = FrozenTarget(model)
        for_head = SimpleNamespace(
            dtype=torch.float32, device=device, embedding=self.target.embedding, vocab_size=self.target.vocab_size
        )
        self.head = random_head(settings.head, config, for_head, settings.depth, settings.shared).train()
        for name, parameter in self.head.named_parameters():
            parameter.requires_grad_(not name.startswith("embed_tokens"))
        self.optimizer = build_optimizer(self.head, 0.0, 0.9, 0.95)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
        self.folder = tempfile.TemporaryDirectory()
        self.packed = packed_rows(settings, self.target.vocab_size, self.folder.name)
        self.index = np.arange(len(self.packed))
        self.reader = RowReader(self.packed, settings.depth, device)
        self.num_tokens = settings.rows * settings.sequence
        self.num_labels = self.count_labels()
        objective = self.kind_of_objective(Loss(settings.loss), [0.8**k for k in range(settings.depth)])
        self.objective = objective.at([0.3] * settings.depth)  # rates for lk's weight of kl

    def count_labels(self):
        return int(self.packed.count_labels().sum())

    def feed(self):
        """The Batch of a step."""
        return self.with_features(*self.read())

    def read(self):
        """Rows from the files and their labels, read ahead as in training.  -> ([input_ids, position_ids, document_ids], Labels)"""
        return self.reader.read(self.index, self.index)[:2]

    def with_features(self, inputs, labels):
        """The Batch of what `read` gave, with the target's features."""
        features = self.target.features(*inputs, self.head.aux_layers)
        return Batch(0, inputs, labels, *self.target.split(features, self.head.aux_layers))

    def predict(self, batch):
        """The head's Predictions."""
        return self.head.predict(batch.features, *batch.inputs, self.target.lm_head.weight, self.settings.depth)

    def ours(self, batch):
        """Gradients by the trainers' own code.  -> the loss"""
        return self.learn(self.predict(batch), batch)

    def learn(self, predictions, batch):
        """The gradients' part of `ours`."""
        totals = accumulate_gradients(
            predictions,
            batch.last,
            batch.labels,
            lm_head=self.target.lm_head,
            objective=self.objective,
            num_labels=self.num_labels,
            chunk_tokens=self.settings.chunk_tokens,
        )
        return summarize(totals, self.objective, self.num_labels)["loss"]

    def plain(self, batch):
        """Gradients by logits of all depths and positions, torch's losses and one backward pass.  -> the loss"""
        predictions, labels = self.predict(batch), batch.labels
        positions, tokens, valid, log_p = labels.positions, labels.tokens, labels.valid, None
        draft_ids = predictions.draft_ids
        if self.settings.loss != "hard":
            log_p = self.log_p(batch.last[positions - 1])  # [N, V]
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

    @torch.no_grad()
    def log_p(self, states):
        """The target's log-probabilities by torch's own operations.  its last states [N, H] -> fp32 [N, V]"""
        return self.target.lm_head(states).float().log_softmax(-1)

    def gradients(self, way):
        batch = self.feed()
        with self.autocast:
            return way(batch)

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
        """(Times of one call of several that follow one another, peak bytes, bytes at rest); the bytes are None on a CPU."""
        on_gpu = self.device.type == "cuda"
        release(self.device)
        for _ in range(WARMUP):
            work()
        rest = None
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            rest = torch.cuda.memory_allocated(self.device)
        marks = [Mark(self.device)]
        for _ in range(self.settings.repeats):
            work()
            marks.append(Mark(self.device))
        samples = [before.until(after) for before, after in itertools.pairwise(marks)]
        return Times.of(samples), torch.cuda.max_memory_allocated(self.device) if on_gpu else None, rest

    def estimate(self):
        """The trainers' MemoryEstimate of a step."""
        return estimate_memory(
            self.head,
            self.target,
            self.optimizer,
            batch_rows=self.settings.rows,
            row_length=self.settings.sequence,
            chunk_tokens=self.settings.chunk_tokens,
            num_depths=self.settings.depth,
            autocast=self.autocast,
            every=self.every,
        )

    def target_operations(self):
        """Operations of the products of the target's layers."""
        return 2 * _weights(self.target.check_layers(())) * self.num_tokens

    def distribution_operations(self, num_labels):
        """Operations of the products of the target's distribution at so many labels."""
        return 0 if self.settings.loss == "hard" else 2 * self.target.lm_head.weight.numel() * num_labels

    def head_operations(self):
        """Operations of the products of the target's distribution and of the head's passes: the table of train.py."""
        head, settings, width, vocab = self.head, self.settings, self.target.hidden_size, self.target.vocab_size
        depth, num_labels = settings.depth, self.num_labels
        distribution = self.distribution_operations(num_labels)
        if settings.head == "medusa":
            blocks = (6 * head.config.num_layers - 2) * width**2
            projection = (4 if head.config.shared_lm_head else 6) * vocab * width
            return distribution + depth * num_labels * (blocks + projection)
        if settings.head == "eagle3":
            per_token = 4 * head.fc.weight.numel() + 6 * depth * _weights(head.midlayer)
            return distribution + self.num_tokens * per_token + 6 * depth * num_labels * head.lm_head.weight.numel()
        inner = head.config.inner_size
        per_token = 4 * width * inner + 6 * (depth - 1) * inner**2
        return distribution + self.num_tokens * per_token + 6 * depth * num_labels * vocab * inner


class BlockSteps(TrainingSteps):
    """The steps of a block drafter, whose blocks are drawn in every step: always the same ones."""

    kind_of_objective = BlockObjective

    def count_labels(self):
        self.blocks = self.draw()
        return self.blocks.num_labels

    @property
    def every(self):
        return max(self.settings.sequence // self.settings.anchors, 1)

    def draw(self):
        """The step's Blocks."""
        drawn = {"seed": 0, "step": 0}
        return draw_blocks(self.packed.select(self.index), self.settings.anchors, self.settings.depth, **drawn)

    def read(self):
        self.blocks = self.draw()
        return super().read()

    def predict(self, batch):
        """The states of the slots that predict.  -> [B, R, K, H]"""
        input_ids, position_ids, document_ids = batch.inputs
        seen = self.blocks.seen(input_ids)
        return self.head(batch.features, *seen, position_ids, document_ids)[:, :, self.head.config.first_slot :]

    def learn(self, states, batch):
        totals = accumulate_block_gradients(
            self.head,
            states,
            self.blocks,
            batch.inputs[0],
            batch.last,
            lm_head=self.target.lm_head,
            objective=self.objective,
            num_labels=self.num_labels,
            chunk_tokens=self.settings.chunk_tokens,
        )
        return summarize_blocks(totals, self.objective, self.num_labels)["loss"]

    def plain(self, batch):
        states, ids, log_p = self.predict(batch), batch.inputs[0].flatten(), None
        row, block, depth = self.blocks.valid.nonzero().T  # [N] each
        before = self.label_places() - 1
        common, same = before.unique(return_inverse=True)
        row, block, depth, before, common, same = (
            one.to(self.device) for one in (row, block, depth, before, common, same)
        )
        if self.settings.loss != "hard":
            log_p = self.log_p(batch.last[common])[same]  # [N, V]
        lm_head = cast_lm_head(self.target.lm_head.weight, states.dtype)
        logits = self.head.logits(states[row, block, depth], ids[before], lm_head)  # [N, V]
        of_kl = [self.objective.kl_weight(k) for k in range(self.settings.depth)]
        of_kl, weights = (torch.tensor(one, device=self.device)[depth] for one in (of_kl, self.objective.weights))
        losses = torch_losses(logits, ids[before + 1], log_p, self.objective.loss.formula, of_kl)
        loss = (weights * losses).sum() / self.num_labels
        loss.backward()
        return loss.item()

    def label_places(self):
        """Where the labels stand in the flattened rows.  -> int64 [N] on the CPU"""
        row, block, depth = self.blocks.valid.nonzero().T
        return row * self.settings.sequence + self.blocks.anchors[row, block] + 1 + depth

    def head_operations(self):
        head = self.head
        of_context = sum(
            _weights(one) for layer in head.layers for one in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        num_slots = self.blocks.anchors.numel() * head.config.block_size
        per_label = 4 * self.target.lm_head.weight.numel() + 6 * head.markov_head.markov_w2.weight.numel()
        return (
            self.distribution_operations(len(self.label_places().unique()))
            + self.num_tokens * (4 * head.fc.weight.numel() + 6 * of_context)
            + num_slots * 6 * _weights(head.layers)
            + self.num_labels * per_label
        )


def _weights(module):
    """Numbers in the weights of all products of a module."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
