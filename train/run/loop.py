"""The loop of every head trainer: work between the steps, this rank's micro-batches, the optimiser step, its figures.

    with Training(recipe, processes, head=head, ...) as training:  # a signal inside leaves a run that can resume
        for step in training:                                      # measures, saves and leaves in between
            for batch in step:
                with training.autocast:
                    predictions = head.predict(batch.features, *batch.inputs, target.lm_head.weight)
                    step.backward(predictions, batch)
            totals = step.finish()
            if step.logs:
                step.record(summarize(totals, step.objective, step.num_labels))
    return training.status

It knows no family of heads, does not predict, and does not choose an objective.

Letters: R rows, T tokens per row, B rows of a micro-batch, M = B T, H hidden size, K depths.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from tqdm import tqdm

from ..data.rows import deal_rows, describe_non_finite, fingerprint, rows_of_step, select_rows
from ..loss.distillation import Labels, accumulate_gradients, find_labels
from ..teacher.feature_cache import cache_features
from .optimization import finish_step
from .run_folder import RunFolder
from .run_recipe import is_due
from .stopping import StopSignals
from .tracking import Speedometer


class Training:
    """A run from its first step, or from a checkpoint, to its end or to a signal.

    Inside the `with` block the run folder exists. Iterating yields a Step per remaining optimiser step; after the last one the head
    is written. status: the script's return value: 0, or 128 + the number of the signal that ended the run early, after a
    checkpoint. autocast: the context that the head computes in.
    """

    def __init__(
        self,
        recipe,
        processes,
        *,
        target,
        tokenizer,
        head,
        optimizer,
        packed,
        labels_per_row,
        held_out,
        meter,
        adapter=None,
    ):
        """target: FrozenTarget; packed, labels_per_row: of build_rows; held_out: conversations that `meter` measures on (meter is
        None if there are none); adapter: a TargetAdapter that is trained beside the head, or None.
        """
        self.recipe, self.processes, self.target, self.tokenizer = recipe, processes, target, tokenizer
        self.head, self.optimizer, self.adapter = head, optimizer, adapter
        self.trained = torch.nn.ModuleList([head, adapter.weights]) if adapter else head
        self.packed, self.labels_per_row = packed, labels_per_row  # int64 [R]
        self.held_out, self.meter = held_out, meter
        self.rows_per_step = recipe.batch_rows * recipe.accumulate * processes.accelerator.num_processes
        self.num_steps = recipe.num_updates(len(labels_per_row), self.rows_per_step)
        self.status, self.cache = 0, None

    def __enter__(self):
        rows = {"rows": fingerprint(self.packed), "rows_per_step": self.rows_per_step}
        trained = {"head": self.head, "optimizer": self.optimizer, "target": self.target, "adapter": self.adapter}
        with ExitStack() as stack:
            self.stop = stack.enter_context(StopSignals())
            self.run = stack.enter_context(
                RunFolder(self.recipe, self.processes, rows=rows, num_steps=self.num_steps, **trained)
            )
            bar = {"total": self.num_steps, "initial": self.run.step, "desc": "training", "unit": "step"}
            self.bar = stack.enter_context(tqdm(**bar, disable=not self.processes.accelerator.is_main_process))
            self.run.keep_held_out(self.held_out)
            self.stack = stack.pop_all()
        self.autocast = torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.run.precision == "bf16")
        return self

    def __exit__(self, *exception):
        return self.stack.__exit__(*exception)

    def __iter__(self):
        recipe, run, stop = self.recipe, self.run, self.stop
        if recipe.cache_features and run.step < self.num_steps:
            layers = self.head.aux_layers
            self.cache = cache_features(run, recipe, self.target, packed=self.packed, stop=stop, layers=layers)
            if self.cache is None:
                run.save(self.head, self.optimizer)
                self.status = run.leave_early(stop)
                return
            self.bar.unpause()  # the time that the features took does not count as steps
        self.objective = recipe.objective.at(run.rates)
        self.speed = Speedometer(run.tokens)
        while True:
            # Once in a while: measure, save, leave. This comes first, so that a resumed run does the work that was due.
            stopping = stop.agreed(self.processes.accelerator)
            if self.meter and is_due(run.step, self.num_steps, recipe.eval_every) and not stopping:
                run.measure(self.meter)
                self.speed.start(run.tokens)
            if stopping or is_due(run.step, self.num_steps, recipe.checkpoint_every):
                run.save(self.head, self.optimizer)
            if stopping:
                self.status = run.leave_early(stop)
                return
            if run.step == self.num_steps:
                break
            yield Step(self)
        run.finish(self.head)


class Step:
    """One optimiser step. Iterating yields this rank's micro-batches; `backward` is called for each, `finish` moves the weights.

    number: steps before this one. objective: what it minimises. num_labels: labels of its micro-batches on all ranks, known
    beforehand; the loss is divided by it. logs: whether its figures are due.
    """

    def __init__(self, training):
        self.training, recipe = training, training.recipe
        self.number, self.objective = training.run.step, training.objective
        self.rows = rows_of_step(self.number, training.rows_per_step, training.packed, recipe.seed)
        self.logs = is_due(self.number + 1, training.num_steps, recipe.log_every)
        self.num_labels = int(training.labels_per_row[self.rows].sum())
        self.fed, self.shares = [], []

    def __iter__(self):
        training = self.training
        device, layers, num_depths = training.processes.device, training.head.aux_layers, len(self.objective.weights)
        for first, index in deal_rows(self.rows, training.recipe, training.processes.accelerator):
            self.fed.append(index.tolist())
            *inputs, supervised = select_rows(training.packed, index, device)  # [B, T] each
            features = last = None
            if not training.adapter:  # with an adapter features change in every step: the joint stage makes them
                cache = training.cache
                features = cache.rows(index, device) if cache else training.target.features(*inputs, layers)
            input_ids, _, document_ids = inputs
            labels = find_labels(input_ids, document_ids, supervised, num_depths)
            if features is not None:
                last, features = training.target.split(features, layers)
            yield Batch(first, inputs, labels, last, features)

    def backward(self, predictions, batch):
        """Add the gradient of a micro-batch's loss to the parameters that made the predictions, chunk by chunk."""
        totals = accumulate_gradients(
            predictions,
            batch.last,
            batch.labels,
            lm_head=self.training.target.lm_head,
            objective=self.objective,
            num_labels=self.num_labels,
            chunk_tokens=self.training.recipe.chunk_tokens,
            with_hits=self.logs,
        )
        self.add(totals)  # [K, 5], or [K, 6] with losses of features

    def add(self, totals):
        """Add the totals of a micro-batch whose gradient is already added. `backward` calls it, and so does a joint stage."""
        self.shares.append(totals)

    def finish(self, max_value=0.0):
        """Sum gradients and totals over the ranks and make the step.  -> the totals, fp64 [K, .], or [1 + K, .] for a joint stage

        max_value: every entry of the gradient is cut to plus or minus this; 0: never. A non-finite number stops the run
        (NonFiniteLoss) before it reaches the weights.
        """
        training, recipe = self.training, self.training.recipe
        self.lr = recipe.learning_rate(self.number, training.num_steps)
        with describe_non_finite(self.number, training.packed, self.fed, training.tokenizer):
            totals, self.grad_norm = finish_step(
                training.trained,
                training.optimizer,
                self.shares,
                accelerator=training.processes.accelerator,
                lr=self.lr,
                max_norm=recipe.max_grad_norm,
                max_value=max_value,
            )
        training.objective = self.objective.after(totals[-len(self.objective.weights) :])  # the head's
        training.run.advance(training.packed.count_tokens(self.rows), training.objective.rates)
        training.bar.update()
        return totals

    def record(self, figures):
        """Record the figures of this step, with its learning rate and the gradient's norm."""
        figures = figures | {"lr": self.lr, "grad_norm": self.grad_norm}
        self.training.run.record_step(figures, self.training.speed, self.training.bar)


@dataclass(frozen=True)
class Batch:
    """A micro-batch of this rank."""

    first: int  # place of its first row among those of the optimiser step, on all ranks
    inputs: list  # input_ids, position_ids, document_ids, [B, T] each
    labels: Labels
    last: torch.Tensor | None  # [M, H] the target's last states; None where an adapter is trained
    features: torch.Tensor | None  # [B, T, H], or [B, T, A H] of aux layers: the head's input; None as above
