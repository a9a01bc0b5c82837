"""RunFolder: a run's folder while it trains, with its state, figures and checkpoints. The trainers' loop uses it.

    runs/<name>/   config.yaml, metrics.jsonl, checkpoints/, best/, acceptance.json, heldout.jsonl, head/, wandb/, wandb.json
                   non-finite-steps.jsonl, if there were any

It decides nothing: the loop decides when something is due, and the script what a step computes.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list, gather_object, set_seed
from tqdm import tqdm

from ...evaluation.acceptance_lines import difference
from ...heads.checkpoint import BEST
from ...heads.families import family_of
from ...heads.storage.atomic_write import write_json
from ..data.conversations import write_conversations
from ..data.held_out import are_shipped
from ..teacher.feature_cache import OWN_FOLDER
from ..teacher.sharded_target import wants_sharded_target
from .acceptance import describe_measurement
from .checkpointing import (
    check_output,
    check_same_run,
    load_checkpoint,
    read_state,
    remove_leftovers,
    save_final_head,
)
from .lineage import find_sources
from .optimization import choose_autocast
from .recipe import resolved_values, save_recipe
from .run_lock import claim, release
from .run_recipe import CHANGEABLE
from .saving.best_head import best_measurement, figures_of, forget_kept, is_measured, restore_best
from .saving.saver import Saver
from .tracking import PLACE_FILE, MetricsFile, WandbTracker, has_wandb, peak_memory

NON_FINITE_FILE = "non-finite-steps.jsonl"


@dataclass(frozen=True)
class Processes:
    """The processes that train, as one of them sees them.

    note(text): tells the user something, on the main rank only. resumed: the checkpoint folder that the run goes on from, or None.
    """

    accelerator: Accelerator
    note: Callable
    resumed: Path | None

    @property
    def device(self):
        return self.accelerator.device


def start_processes(recipe, name):
    """Processes of a run.

    name: the trainer's, printed before every note. Seeds every random generator. Raises ValueError for an output that cannot be
    used, a damaged checkpoint, or an accelerate set-up that is not in configs/accelerate.
    """
    check_output(recipe.output, recipe.resume, recipe.resume_from)
    tracked = recipe.tracker == "wandb" and has_wandb()
    log_with = "wandb" if tracked else None
    accelerator = Accelerator(mixed_precision="no", log_with=log_with, kwargs_handlers=[patient_processes()])
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched, and accelerate runs each of them alone, as where it finds no GPU: start one, or "
            "try several on the CPU with ACCELERATE_USE_CPU=true before the command"
        )
    kinds = DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.FSDP
    if accelerator.distributed_type not in kinds:
        raise ValueError(f"accelerate is set up for {accelerator.distributed_type}: take a file of configs/accelerate")
    if wants_sharded_target() and os.environ.get("FSDP_VERSION") != "2":
        raise ValueError("accelerate is set up for the first FSDP: take configs/accelerate/fsdp2.yaml")

    take_folder(recipe.output, accelerator)
    resumed = recipe.checkpoint_to_resume  # now that no other process writes checkpoints

    def note(text):
        if accelerator.is_main_process:
            tqdm.write(f"[{name}] {text}", file=sys.stderr)

    if recipe.tracker == "wandb" and not tracked:
        note("wandb is not installed: figures go to metrics.jsonl only")
    if recipe.resume and not resumed:
        note(f"{recipe.output} was stopped before its first checkpoint: starting from step 0")
    set_seed(recipe.seed)
    return Processes(accelerator, note, resumed)


def patient_processes():
    """Options of Accelerator for long waits: a process may download, measure, generate or save for hours while others wait."""
    return InitProcessGroupKwargs(timeout=timedelta(days=30))


def take_folder(output, accelerator):
    """Lock the folder, if it exists, against other trainings. ValueError, on every rank, if another training writes into it now."""
    (taken,) = broadcast_object_list([not accelerator.is_main_process or claim(output)])
    if not taken:
        raise ValueError(
            f"another process is training into {output}: wait for its end, stop it (SIGTERM lets it save first), or name another "
            "output"
        )


def begin_folder(recipe, accelerator):
    """Make the run folder, with its config.yaml, before long work that writes into it. A run killed then can start again."""
    if accelerator.is_main_process:
        Path(recipe.output).mkdir(parents=True, exist_ok=True)
    take_folder(recipe.output, accelerator)
    if accelerator.is_main_process:
        values = resolved_values(recipe) | {"resume": False, "resume_from": ""}
        save_recipe(values, Path(recipe.output, "config.yaml"))
    accelerator.wait_for_everyone()


def choose_precision(recipe, processes, target):
    """ "bf16" or "no", as `autocast` says: chosen when the run was started."""
    if processes.resumed and recipe.autocast == "auto":
        return read_state(processes.resumed)["recipe"]["autocast"]
    # On a CPU the choice is measured: all ranks take the main rank's.
    return broadcast_object_list([choose_autocast(recipe.autocast, target, processes.device)])[0]


class RunFolder:
    """The folder of a running training. It is opened after all checks; from then on a signal leaves a run that can resume.

    step, tokens: steps done and tokens seen so far. num_worse: measurements since the best one, on all ranks alike.
    """

    def __init__(self, recipe, processes, *, rows, num_steps, precision, head, optimizer, target, adapter=None):
        """Make or reopen the folder; for a resumed run, load the checkpoint into head, optimiser and random generators.

        rows: {"rows": fingerprint, "rows_per_step": int}, which a resumed run must keep; num_steps: of the whole run; precision:
        of choose_precision; adapter: a TargetAdapter that is trained beside the head, or None. Raises ValueError if the checkpoint
        belongs to another run, or is already beyond num_steps.
        """
        accelerator, note, resumed = processes.accelerator, processes.note, processes.resumed
        self.path = Path(recipe.output)
        self.keeps_held_out = not are_shipped(recipe.data, recipe.eval_data, recipe.target)
        self.accelerator, self.is_main, self.note = accelerator, accelerator.is_main_process, note
        self.adapter, self.log_checkpoints = adapter, recipe.log_checkpoints
        values = resolved_values(recipe) | {"autocast": precision, "resume": False, "resume_from": ""}
        self.state = {"step": 0, "tokens": 0, **rows, "recipe": values}
        if resumed:
            defaults = {f.name: f.default for f in fields(recipe) if f.default is not MISSING}
            self.state = check_same_run(read_state(resumed), self.state, defaults, CHANGEABLE, note)
            if self.step > num_steps:
                raise ValueError(
                    f"{resumed} is at step {self.step}, beyond the run's {num_steps}: set max_steps to {self.step} to end there, "
                    "or higher to go on"
                )
            load_checkpoint(resumed, head, optimizer, accelerator, adapter)
            note(f"going on from {resumed}, after step {self.step}")
        self.saver = Saver(
            self.path,
            accelerator,
            saved_step=self.step if resumed else -1,
            num_kept=recipe.keep_checkpoints,
            adapter=adapter,
            checksums=recipe.checkpoint_checksums,
        )
        if self.is_main:
            self.path.mkdir(parents=True, exist_ok=True)
        take_folder(self.path, accelerator)
        if self.is_main:
            save_recipe(self.state["recipe"], self.path / "config.yaml")
            remove_leftovers(self.path)
        accelerator.wait_for_everyone()
        self.metrics = MetricsFile(self.path / "metrics.jsonl" if self.is_main else None)
        self.non_finite = MetricsFile(self.path / NON_FINITE_FILE if self.is_main else None)
        for file in (self.metrics, self.non_finite):
            file.truncate_after(self.step if resumed else -1)
        self.better = None  # what was measured on the present head, if no earlier one was better
        self.family = family_of(head).name
        if self.is_main:
            self._restore_best()
        self._count_worse()
        tracked = bool(accelerator.log_with) and self.is_main
        self.curves = WandbTracker(
            accelerator if tracked else None,
            self.path,
            self.state["recipe"] | {"family": self.family},
            note,
            lambda: find_sources(recipe, target.model, rows["rows"]),
            with_samples=recipe.log_samples,
        )

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception):
        try:
            if kind is not KeyboardInterrupt:  # a second Ctrl-C, which waits for nothing
                self.saver.wait()
        except OSError as error:
            if kind is None:
                raise
            self.note(str(error))  # the first error is the one that ends the run
        finally:
            self.curves.close()
            release(self.path)

    @property
    def step(self):
        return self.state["step"]

    @property
    def tokens(self):
        return self.state["tokens"]

    def keep_held_out(self, conversations):
        """Write the held-out conversations, for `headstart tree RUN` to measure on; not those in the target's folder."""
        if self.is_main and not self.keeps_held_out:
            (self.path / "heldout.jsonl").unlink(
                missing_ok=True
            )  # of a run that measured on other conversations before it was resumed
        elif self.is_main and conversations:
            self.note(f"{len(conversations)} conversations are held out to measure on (eval_prompts, eval_data)")
            write_conversations(self.path / "heldout.jsonl", conversations)

    @property
    def rates(self):
        """Each depth's rate of acceptance in the previous step, for a loss that depends on it; else None."""
        return self.state.get("rates")

    def advance(self, tokens, rates):
        """Count one more optimiser step with this many tokens.  rates: of the objective of the next step"""
        self.state["step"] += 1
        self.state["tokens"] += tokens
        if rates is not None:
            self.state["rates"] = rates

    def skip_step(self, error, fed, most):
        """Count the step as left out, and write what was in it to a file. Called on every rank, before `advance`.

        error: its NonFiniteLoss, which is raised again if `most` steps were left out before; fed: of describe_micro_steps
        """
        file, before = self.path / NON_FINITE_FILE, self.state.get("skipped_steps", 0)
        ranks = gather_object([fed])
        self.non_finite.write({"step": self.step + 1, "not_finite": error.what, "ranks": ranks})
        said = f"the {error.what} of step {self.step + 1} is not finite ({file} says what was in it)"
        if before >= most:
            error.args = (
                f"{said}; max_skipped_steps {most} lets the run leave out no {'more' if most else 'such step'}",
            )
            raise error
        self.state["skipped_steps"] = before + 1
        self.note(f"{said}: it is left out, as {before + 1} of at most {most}")

    def record(self, kind, figures):
        """Write a line of metrics.jsonl, and log its curves."""
        line = {"step": self.step, "kind": kind} | figures
        if kind == "train":
            line["peak_memory_gib"] = peak_memory(self.accelerator.device)
        self.metrics.write(line)
        self.curves.log(line)

    def record_step(self, figures, speed, bar):
        """Write the figures of the step just made to metrics.jsonl and the progress bar.  speed: Speedometer"""
        speed = speed.read(self.tokens)
        counts = {"tokens": self.tokens, "skipped_steps": self.state.get("skipped_steps", 0)}
        self.record("train", figures | counts | {"tokens_per_second": speed})
        bar.set_postfix_str(f"loss {figures['loss']:.3f}, {speed:,.0f} tokens/s", refresh=False)

    def measure(self, meter, stop):
        """Measure with the AcceptanceMeter and keep the result, once per step and prompts, also in a resumed run.

        The main rank measures, or, with a sharded target, all ranks together. A signal (StopSignals) may end it without a result:
        the resumed run measures again.
        """
        (due,) = broadcast_object_list([self.is_main and not is_measured(self.metrics.lines(), self.step, meter)])
        if due and (self.is_main or meter.target.is_sharded):
            measured = meter.measure(stop)
            if measured and self.is_main:
                self._record_acceptance(measured)
        self._count_worse()

    def _restore_best(self):
        """Take best/ back to the best head of the measurements that count."""
        best, _ = best_measurement(self.metrics.lines())
        if restore_best(self.path, best and best["step"]) or not best:
            return
        if best["step"] == self.step:  # killed before it was written, or of a version without best/: the head is here
            self.better = figures_of(self.path, best, self.family)
        else:
            self.note(
                f"the best head so far, of step {best['step']}, is not kept any more: the next better one is written to best/"
            )

    def _count_worse(self):
        (self.num_worse,) = broadcast_object_list([best_measurement(self.metrics.lines())[1]])

    def _record_acceptance(self, measured):
        # The file first: a run killed before the line is written measures again.
        told = {"step": self.step, "family": self.family, **measured}
        write_json(self.path / "acceptance.json", told)
        names = ["acceptance_length", "per_position", "num_steps", "source"]
        more = ("measured_on", "head_loss", "sets", "set_losses", "heldout_loss", "frozen_heldout_loss")
        names += [name for name in more if name in measured]
        before = next((line for line in reversed(self.metrics.lines()) if line["kind"] == "acceptance"), None)
        if before and (why := difference(before, measured)):
            self.note(
                f"figures from step {self.step} on do not compare with those before: {why}. best/ and patience begin anew"
            )
        self.record("acceptance", {name: measured[name] for name in names})
        is_best = best_measurement(self.metrics.lines())[0]["step"] == self.step
        self.better = told if is_best else None
        first, *more = describe_measurement(measured)
        for text in (f"step {self.step}{', the best so far' if is_best else ''}: {first}", *more):
            self.note(text)
        self.curves.log_acceptance(self.step, measured)

    def save(self, head, optimizer, checkpoint):
        """Begin to write a checkpoint of this step, if one is due, and the head to best/, if it was just measured to be the best.

        Called on every rank, in every step: it raises the error of a write that has failed.
        """
        self.saver.check()
        best, self.better = self.better, None
        begun = self.saver.save(self.state, head, optimizer, checkpoint=checkpoint, best=best)
        if begun and self.log_checkpoints:
            written = self.path / "checkpoints" / f"step-{self.step:06d}" / "head"
            self.saver.then = partial(self.curves.log_checkpoint, written, self.step, self._told_of(head))

    def _told_of(self, head):
        """Metadata of the head's artifact, beside its lineage."""
        told = {"family": self.family, "tokens": self.tokens, "loss": self.state["recipe"]["loss"]}
        return told | asdict(head.config)

    def leave_early(self, stop, head, optimizer):
        """Save, and return the script's value after a signal: 128 + its number."""
        if not self.saver.leave(stop, partial(self.save, head, optimizer, checkpoint=True)):
            self.note(
                f"no time was left to write a checkpoint of step {self.step}: the run goes on from {self.saver.saved_step}"
            )
        self.note(
            f"stopped by signal {stop.requested} after step {self.step}; go on with --config {self.path / 'config.yaml'} --resume"
        )
        return 128 + (stop.requested or signal.SIGTERM)

    def finish(self, head, ended=""):
        """Write <run>/head, and remove a feature cache in the run folder.

        ended: why the run ends before its last step, recorded as a line of metrics.jsonl.
        """
        if self.is_main:
            if ended:
                self.metrics.write({"step": self.step, "kind": "end", "reason": ended})
                self.note(f"ended after step {self.step}: {ended}")
            self.saver.wait()
            forget_kept(self.path)  # that of a measurement on other prompts in the step of the newest checkpoint
            save_final_head(head, self.path, self.adapter)
            if not self.curves.active:  # an extended run: wandb.json describes the replaced head
                (self.path / PLACE_FILE).unlink(missing_ok=True)
            self.curves.log_head(self.path / "head", self.step, self._told_of(head))
            shutil.rmtree(self.path / OWN_FOLDER, ignore_errors=True)
        best, _ = best_measurement(self.metrics.lines())
        if best and best["step"] < self.step and (self.path / BEST).is_dir():
            self.note(f"the best head is that of step {best['step']}, in {self.path / 'best'}")
        self.note(
            f"done: {self.path / 'head'} after {self.step} steps; next: headstart tree {self.path}, heads.export {self.path}"
        )
