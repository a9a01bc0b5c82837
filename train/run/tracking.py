"""Log a run's figures: always to metrics.jsonl, and to W&B through accelerate if the recipe asks for it.

metrics.jsonl holds one JSON object per line, of kind "train" or "acceptance", or "end" of a run that ended early. W&B holds the
recipe, the keys of every panel of the dashboard (train/report/dashboard.py), and at the end the head as an artifact with links to
its target and its data. W&B is online if this machine is logged in (train/run/wandb_login.py), else offline, inside the run folder.
It never asks the user, and its failures never end a run: they become notes.
"""

import importlib.util
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch

from ...evaluation.charts import heat_map
from ...heads.storage.atomic_write import write_json, write_whole
from ..report.dashboard import curves
from ..report.page import standalone
from .lineage import artifact_name
from .wandb_login import wandb_mode

TRACKERS = ("wandb", "none")
START_TIMEOUT = 60  # seconds for W&B to answer, before the run goes on without it
PLACE_FILE = "wandb.json"  # of a run folder; read by hub_export/measurements.py
UPLOAD_LIMIT = 2 * 2**30  # bytes; a larger head is not uploaded, W&B gets only its path


class MetricsFile:
    """metrics.jsonl of a run folder. Only the main rank writes; on the others `path` is None."""

    def __init__(self, path):
        self.path = path

    def truncate_after(self, step):
        """Remove the lines after `step` and of an end, for a run that goes on from there, and a line cut short by a crash."""
        if self.path is not None and self.path.exists():
            kept = [line for line in self.lines() if line["step"] <= step and line.get("kind") != "end"]
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def lines(self):
        """The whole lines as dicts."""
        if self.path is None or not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def write(self, line):
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class Speedometer:
    """Tokens per second since the last reading."""

    def __init__(self, tokens):
        self.start(tokens)

    def start(self, tokens):
        self.tokens, self.clock = tokens, time.perf_counter()

    def read(self, tokens):
        """The speed since the last reading; starts the next interval.  tokens: the count so far"""
        before, clock = self.tokens, self.clock
        self.start(tokens)
        return (tokens - before) / (self.clock - clock)


def peak_memory(device):
    """Greatest memory of this process in GiB: on its GPU, through torch, or the machine's memory if it trains on the CPU.

    On a GPU the count starts after the engine that measures acceptance is built: it sizes its cache with the same counter.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def has_wandb():
    return importlib.util.find_spec("wandb") is not None


class WandbTracker:
    """A W&B run driven through accelerate, or nothing at all (`active` False).

    accelerator: made with log_with="wandb", None for no W&B; folder: the run's; config: the recipe as a dict; note(text): tells the
    user; find_sources(): the run's target and data (train/run/lineage.py). Without with_samples no text of a prompt or an output is
    logged.
    """

    def __init__(self, accelerator, folder, config, note, find_sources, with_samples=True):
        self.accelerator, self.active, self.folder = accelerator, False, Path(folder)
        self.note, self.refused, self.sources = note, set(), ()
        self.with_samples, self.environment = with_samples, {}
        mode = wandb_mode()
        if accelerator is None or mode == "disabled":
            return
        try:
            import wandb
        except ImportError as error:
            note(f"W&B cannot be imported ({error}): figures go to metrics.jsonl only")
            return
        for attempt in dict.fromkeys((mode, "offline")):
            if self._start(wandb, attempt, config):
                self._attempt("the lineage", self._log_sources, find_sources)
                return

    def _start(self, wandb, mode, config):
        own = {"WANDB_SILENT": "true"}
        if mode == "offline":
            # Nothing is written outside the run folder; WANDB_MODE also keeps the library from asking for a login.
            own |= {
                f"WANDB_{name}_DIR": str(self.folder / "wandb" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")
            }
            own["WANDB_MODE"] = "offline"
        for name, value in own.items():
            self.environment.setdefault(name, os.environ.get(name))
            os.environ[name] = value
        (self.folder / "wandb").mkdir(exist_ok=True)
        settings = wandb.Settings(init_timeout=START_TIMEOUT, console="off")
        options = {"name": self.folder.name, "group": self.folder.name, "dir": str(self.folder), "mode": mode}
        try:
            self.accelerator.init_trackers("headstart", config, {"wandb": options | {"settings": settings}})
        except Exception as error:
            self.note(f"W&B does not start {mode} ({_first_line(error)})")
            self.accelerator.trackers.clear()  # it keeps the failed tracker and would start it again
            return False
        self.active = True
        self._attempt("its address", self._write_place)
        where = f"offline, in {self.folder}/wandb; `wandb sync` uploads it" if mode == "offline" else "online"
        self.note(f"W&B: {where}")
        return True

    def _attempt(self, what, log, *arguments):
        """Call log(*arguments). Any exception becomes a note, told once, and never ends the run: W&B raises many types."""
        if not self.active:
            return
        try:
            log(*arguments)
        except Exception as error:
            if what not in self.refused:
                self.note(f"W&B does not take {what} ({_first_line(error)}); the run folder has it")
            self.refused.add(what)

    def log(self, line):
        """Log a line of metrics.jsonl as curves."""
        self._attempt("the curves", lambda: self.accelerator.log(curves(line), step=line["step"]))

    def log_acceptance(self, step, measured):
        """Log the result of AcceptanceMeter.measure: acceptance per position, rates per depth and rank, samples if asked for."""
        self._attempt("the acceptance", self._log_acceptance, step, measured)

    def _log_acceptance(self, step, measured):
        import wandb

        positions = wandb.Table(
            columns=["position", "accepted"], data=[*map(list, enumerate(measured["per_position"]))]
        )
        media = {
            "acceptance/per_position": wandb.plot.bar(
                positions, "position", "accepted", title=f"accepted per step, after step {step}"
            ),
        }
        if self.with_samples:
            samples = [[step, sample["prompt"], sample["output"]] for sample in measured["samples"]]
            media["samples"] = wandb.Table(columns=["step", "prompt", "output"], data=samples)
        rates = measured.get("rates")  # only the engine counts them
        if rates:
            cells = [[step, depth + 1, rank, rate] for depth, row in enumerate(rates) for rank, rate in enumerate(row)]
            drawing = heat_map(rates, title="Acceptance rate per depth and rank")
            media["acceptance/rates"] = wandb.Table(columns=["step", "depth", "rank", "rate"], data=cells)
            media["acceptance/heat_map"] = wandb.Html(standalone(drawing), inject=False)
        self.accelerator.log(media, step=step)

    def log_head(self, head_folder, step, metadata):
        """Log the finished head as an artifact. Its files stay in place until they are uploaded."""
        self._attempt("the head", self._log_head, Path(head_folder), step, metadata)

    def log_checkpoint(self, head_folder, step, metadata):
        """Log a checkpoint's head as a version of the same artifact, unless above UPLOAD_LIMIT. Copied: checkpoints are removed."""
        if _size(head_folder) <= UPLOAD_LIMIT:
            self._attempt("a checkpoint's head", self._log_version, Path(head_folder), step, metadata, "mutable")

    def _log_head(self, head_folder, step, metadata):
        self._write_place(self._log_version(head_folder, step, metadata, "immutable"))

    def _log_version(self, head_folder, step, metadata, policy):
        import wandb

        lineage = {source.role: source.metadata for source in self.sources}
        name = artifact_name(self.folder.name, "head")
        artifact = wandb.Artifact(name, "model", metadata=metadata | lineage)
        if _size(head_folder) <= UPLOAD_LIMIT:
            artifact.add_dir(str(head_folder), policy=policy, skip_cache=True)
        else:
            artifact.add_reference(head_folder.resolve().as_uri())
        self._run().log_artifact(artifact, aliases=["latest", f"step-{step}"])
        return f"{name}:step-{step}"

    def _write_place(self, artifact=None):
        """Write wandb.json: W&B's addresses of this run and of the head, for the card of an export."""
        run = self._run()
        if run.offline:
            place = {"run": run.id, "offline": True}
        else:
            place = {"run": run.url} | ({"artifact": f"{run.entity}/{run.project}/{artifact}"} if artifact else {})
        write_json(self.folder / PLACE_FILE, place)

    def _log_sources(self, find_sources):
        """Log target and data as artifacts that this run uses: described and linked, not uploaded."""
        import wandb

        self.sources = find_sources()
        for source in self.sources:
            artifact = wandb.Artifact(source.name, source.kind, metadata=source.metadata)
            with artifact.new_file("source.json") as file:  # a changed description is another version
                json.dump(source.metadata, file, indent=2)
            if source.uri:
                artifact.add_reference(source.uri, checksum=False)
            # Run.use_artifact makes this call and then waits, which never ends offline.
            self._run()._log_artifact(artifact, is_user_created=True, use_after_commit=True)

    def _run(self):
        return self.accelerator.get_tracker("wandb", unwrap=True)

    def close(self):
        """Finish the W&B run and restore the environment."""
        if self.active:
            self._attempt("the end of the run", self._finish)
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.environment, self.active = {}, False

    def _finish(self):
        import wandb

        for tracker in self.accelerator.trackers:
            tracker.finish()
        # finish returns before the background process has written the end of its file; teardown waits for it to leave.
        wandb.teardown()


def _size(folder):
    """Bytes of all files in a folder and below it (a head may hold an adapter/)."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
