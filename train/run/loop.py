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
from itertools import zip_longest

import torch
from tqdm import tqdm

from ..data.packed.row_reader import RowReader
from ..data.rows import deal_rows, describe_micro_steps, fingerprint, rows_of_step
from ..estimate.dry_run import NoRun, rehearse
from ..estimate.memory import check_estimate, estimate_memory
from ..loss.distillation import Labels, accumulate_gradients
from ..teacher.feature_cache import cache_features
from .optimization import NonFiniteLoss, finish_step
from .run_folder import RunFolder, choose_precision
from .run_lock import release
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
        every=1,
    ):
        """target: FrozenTarget; packed, labels_per_row: of build_rows; held_out: conversations that `meter` measures on (meter is
        None if there are none); adapter: a TargetAdapter that is trained beside the head, or None; every: the head predicts after
        about one of so many tokens.
        """
        self.recipe, self.processes, self.target, self.tokenizer = recipe, processes, target, tokenizer
        self.head, self.optimizer, self.adapter = head, optimizer, adapter
        self.trained = torch.nn.ModuleList([head, adapter.weights]) if adapter else head
        self.packed, self.labels_per_row = packed, labels_per_row  # int64 [R]
        self.held_out, self.meter, self.every = held_out, meter, every
        self.rows_per_step = recipe.batch_rows * recipe.accumulate * processes.accelerator.num_processes
        self.num_steps = recipe.num_updates(len(labels_per_row), self.rows_per_step)
        self.status = 0

    def __enter__(self):
        recipe, processes = self.recipe, self.processes
        precision = choose_precision(recipe, processes, self.target)
        self.autocast = torch.autocast(processes.device.type, torch.bfloat16, enabled=precision == "bf16")
        self._tell_memory()
        self.reader = RowReader(self.packed, len(recipe.objective.weights), processes.device)
        if recipe.dry_run:
            self.run, self.stack = NoRun(), ExitStack()
            self.stack.callback(release, recipe.output)
            self.stack.enter_context(self.reader)
            return self
        rows = {"rows": fingerprint(self.packed), "rows_per_step": self.rows_per_step}
        trained = {"head": self.head, "optimizer": self.optimizer, "target": self.target, "adapter": self.adapter}
        with ExitStack() as stack:
            stack.enter_context(self.reader)
            self.stop = stack.enter_context(StopSignals())
            self.run = stack.enter_context(
                RunFolder(recipe, processes, rows=rows, num_steps=self.num_steps, precision=precision, **trained)
            )
            bar = {"total": self.num_steps, "initial": self.run.step, "desc": "training", "unit": "step"}
            self.bar = stack.enter_context(tqdm(**bar, disable=not processes.accelerator.is_main_process))
            self.run.keep_held_out(self.held_out)
            self.stack = stack.pop_all()
        return self

    def _tell_memory(self):
        """Say what a step will need; ValueError if it cannot fit."""
        recipe, processes = self.recipe, self.processes
        need = estimate_memory(
            self.head,
            self.target,
            self.optimizer,
            batch_rows=recipe.batch_rows,
            row_length=recipe.row_length,
            chunk_tokens=recipe.chunk_tokens,
            num_depths=len(recipe.objective.weights),
            autocast=self.autocast,
            every=self.every,
        )
        processes.note(f"memory: {need.describe(recipe.batch_rows * recipe.row_length)}")
        warning = check_estimate(need, processes.device)
        if warning:
            processes.note(warning)

    def __exit__(self, *exception):
        return self.stack.__exit__(*exception)

    def rows_of(self, step):
        """The rows of an optimiser step, on all ranks."""
        return rows_of_step(step, self.rows_per_step, self.packed, self.recipe.seed)

    def _compute_features(self, step):
        """Compute this rank's features of a step, and forget them."""
        for _, index in self.deal(step.rows):
            inputs, _, _ = self.reader.read(index)
            self.target.features(*inputs, self.head.aux_layers)

    def deal(self, rows):
        """This rank's micro-batches of an optimiser step's rows."""
        return list(deal_rows(rows, self.recipe, self.processes.accelerator))

    def __iter__(self):
        if self.recipe.dry_run:
            self.objective = self.recipe.objective
            sizes = {"rows_per_step": self.rows_per_step, "row_length": self.recipe.row_length}
            told = {"device": self.processes.device, "note": self.processes.note}
            steps = (StandingStep(self) for _ in range(2))
            cached = {"cached": len(self.packed) * self.recipe.cache_features, "compute": self._compute_features}
            yield from rehearse(steps, num_steps=self.num_steps, **sizes, **told, **cached)
            return
        recipe, run, stop = self.recipe, self.run, self.stop
        if recipe.cache_features and run.step < self.num_steps:
            layers = self.head.aux_layers
            cache = cache_features(run, recipe, self.target, packed=self.packed, stop=stop, layers=layers)
            if cache is None:
                self.status = run.leave_early(stop, self.head, self.optimizer)
                return
            self.reader.cache = cache
            self.bar.unpause()  # the time that the features took does not count as steps
        self.objective = recipe.objective.at(run.rates)
        self.speed = Speedometer(run.tokens)
        while True:
            # Once in a while: measure, save, leave. This comes first, so that a resumed run does the work that was due.
            stopping = stop.agreed(self.processes.accelerator)
            measures = self.meter and is_due(run.step, self.num_steps, recipe.eval_every) and not stopping
            saves = is_due(run.step, self.num_steps, recipe.checkpoint_every)
            if measures:
                self.reader.wait()
                run.measure(self.meter, stop)
                self.speed.start(run.tokens)
            if measures or saves:
                run.saver.wait()
                stopping = stopping or stop.agreed(self.processes.accelerator)  # a signal may have come meanwhile
            if stopping:
                self.status = run.leave_early(stop, self.head, self.optimizer)
                return
            tired = 0 < recipe.patience <= run.num_worse
            run.save(self.head, self.optimizer, checkpoint=saves or tired)
            if tired or run.step == self.num_steps:
                break
            yield Step(self)
        run.finish(self.head, f"{run.num_worse} measurements without a better one (patience)" if tired else "")


class Step:
    """One optimiser step. Iterating yields this rank's micro-batches; `backward` is called for each, `finish` moves the weights.

    number: steps before this one. objective: what it minimises. num_labels: labels of its micro-batches on all ranks, known
    beforehand; the loss is divided by it (a script whose labels are others sets it). logs: whether its figures are due.
    """

    def __init__(self, training):
        self.training, recipe = training, training.recipe
        self.number, self.objective = training.run.step, training.objective
        self.next_step = self.number + 1
        self.rows = training.rows_of(self.number)
        self.logs = is_due(self.number + 1, training.num_steps, recipe.log_every)
        self.num_labels = int(training.labels_per_row[self.rows].sum())
        self.fed, self.shares = [], []

    def __iter__(self):
        training = self.training
        layers = training.head.aux_layers
        dealt = training.deal(self.rows)
        following = [index for _, index in dealt[1:]]
        if self.next_step < training.num_steps:
            following.append(training.deal(training.rows_of(self.next_step))[0][1])
        for (first, index), after in zip_longest(dealt, following):
            self.fed.append(index.tolist())
            inputs, labels, features = training.reader.read(index, after)  # [B, T] each
            last = None
            if not training.adapter:  # with an adapter features change in every step: the joint stage makes them
                if features is None:
                    features = training.target.features(*inputs, layers)
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

        max_value: every entry of the gradient is cut to plus or minus this; 0: never. A step with a non-finite number is left out,
        and gives no figures (None); beyond max_skipped_steps it stops the run (NonFiniteLoss).
        """
        training, recipe = self.training, self.training.recipe
        self.lr = recipe.learning_rate(self.number, training.num_steps)
        try:
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
        except NonFiniteLoss as error:  # on all ranks
            totals, self.logs = None, False
            fed = describe_micro_steps(
                training.packed, self.fed, self.shares, at_fault=error.micro_steps, tokenizer=training.tokenizer
            )
            training.run.skip_step(error, fed, recipe.max_skipped_steps)
            training.optimizer.zero_grad()
        training.run.advance(training.packed.count_tokens(self.rows), training.objective.rates)
        training.bar.update()
        return totals

    def record(self, figures):
        """Record the figures of this step, with its learning rate and the gradient's norm."""
        figures = figures | {"lr": self.lr, "grad_norm": self.grad_norm}
        self.training.run.record_step(figures, self.training.speed, self.training.bar)


class StandingStep(Step):
    """The first step, whose optimiser stands still: a dry run's."""

    def __init__(self, training):
        super().__init__(training)
        self.next_step, self.logs = self.number, False

    def finish(self, max_value=0.0):
        """Sum the gradients over the ranks as `Step.finish`, and forget them. NonFiniteLoss if the loss is not finite."""
        training = self.training
        accelerator = training.processes.accelerator
        totals = accelerator.reduce(sum(self.shares), "sum")
        if not totals[:, 0].isfinite().all():
            raise NonFiniteLoss("loss of the first step", [])
        if accelerator.num_processes > 1:
            training.optimizer.sum_gradients()
        training.optimizer.zero_grad()
        return totals


@dataclass(frozen=True)
class Batch:
    """A micro-batch of this rank."""

    first: int  # place of its first row among those of the optimiser step, on all ranks
    inputs: list  # input_ids, position_ids, document_ids, [B, T] each
    labels: Labels
    last: torch.Tensor | None  # [M, H] the target's last states; None where an adapter is trained
    features: torch.Tensor | None  # [B, T, H], or [B, T, A H] of aux layers: the head's input; None as above
