"""Where a run's figures go: always metrics.jsonl, and W&B through accelerate if the recipe asks for it.

metrics.jsonl holds one JSON object per line, of kind "train" or "acceptance". W&B holds the recipe, what every panel of the
dashboard shows (train/report/dashboard.py), and at the end the head as an artifact that knows its target and its data. It is
online if this machine is logged in (train/run/wandb_login.py), else offline, inside the run folder. It never asks, and a run
never ends because of it: whatever is missing becomes a note.
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
UPLOAD_LIMIT = 2 * 2**30  # bytes of a head that is uploaded; of a larger one W&B is told the place only


class MetricsFile:
    """metrics.jsonl of a run folder. On other ranks than the main one it writes nothing (`path` None)."""

    def __init__(self, path):
        self.path = path

    def truncate_after(self, step):
        """Keep the lines up to `step`, for a run that goes on from there; a line cut short by a crash goes too."""
        if self.path is None or not self.path.exists():
            return
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        write_whole(self.path, "".join(kept))

    def lines(self):
        """The whole lines as dicts."""
        if self.path is None or not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def has(self, kind, step):
        """Is there a line of this kind for this step?"""
        return any(line["kind"] == kind and line["step"] == step for line in self.lines())

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
        """The speed up to now, `tokens` being the count by now; starts the next interval."""
        before, clock = self.tokens, self.clock
        self.start(tokens)
        return (tokens - before) / (self.clock - clock)


def peak_memory(device):
    """GiB: the most this process has held on its GPU, through torch; where it trains on the CPU, of the machine's memory.

    On a GPU the count starts once the engine that measures acceptance is built: it sizes its cache with the same counter.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def has_wandb():
    return importlib.util.find_spec("wandb") is not None


class WandbTracker:
    """A W&B run driven through accelerate, or nothing at all (`active` False).

    accelerator: made with log_with="wandb", None for no W&B; folder: the run's; config: dict of what the run was told; note(text):
    tells the user; find_sources(): what the run reads (train/run/lineage.py).
    """

    def __init__(self, accelerator, folder, config, note, find_sources):
        self.accelerator, self.active, self.folder = accelerator, False, Path(folder)
        self.note, self.refused, self.sources = note, set(), ()
        self.environment = {}
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
            self.accelerator.trackers.clear()  # it keeps the one that failed and would start it again
            return False
        self.active = True
        self._attempt("its address", self._write_place)
        where = f"offline, in {self.folder}/wandb; `wandb sync` uploads it" if mode == "offline" else "online"
        self.note(f"W&B: {where}")
        return True

    def _attempt(self, what, log, *arguments):
        """log(*arguments), where a failure is a note, told once, and never the end of the run: W&B raises whatever it likes."""
        if not self.active:
            return
        try:
            log(*arguments)
        except Exception as error:
            if what not in self.refused:
                self.note(f"W&B does not take {what} ({_first_line(error)}); the run folder has it")
            self.refused.add(what)

    def log(self, line):
        """A line of metrics.jsonl as curves."""
        self._attempt("the curves", lambda: self.accelerator.log(curves(line), step=line["step"]))

    def log_acceptance(self, step, measured):
        """What AcceptanceMeter.measure found: acceptance per position, rates per depth and rank, sample generations."""
        self._attempt("the acceptance", self._log_acceptance, step, measured)

    def _log_acceptance(self, step, measured):
        import wandb

        positions = wandb.Table(
            columns=["position", "accepted"], data=[*map(list, enumerate(measured["per_position"]))]
        )
        samples = [[step, sample["prompt"], sample["output"]] for sample in measured["samples"]]
        media = {
            "acceptance/per_position": wandb.plot.bar(
                positions, "position", "accepted", title=f"accepted per step, after step {step}"
            ),
            "samples": wandb.Table(columns=["step", "prompt", "output"], data=samples),
        }
        rates = measured.get("rates")  # only the engine counts them
        if rates:
            cells = [[step, depth + 1, rank, rate] for depth, row in enumerate(rates) for rank, rate in enumerate(row)]
            drawing = heat_map(rates, title="Acceptance rate per depth and rank")
            media["acceptance/rates"] = wandb.Table(columns=["step", "depth", "rank", "rate"], data=cells)
            media["acceptance/heat_map"] = wandb.Html(standalone(drawing), inject=False)
        self.accelerator.log(media, step=step)

    def log_head(self, head_folder, step, metadata):
        """The finished head as an artifact. Its files stay where they are until they are uploaded."""
        self._attempt("the head", self._log_head, Path(head_folder), step, metadata)

    def log_checkpoint(self, head_folder, step, metadata):
        """A checkpoint's head as a version of the same artifact: copied, as checkpoints make way; none above UPLOAD_LIMIT."""
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
        """wandb.json: where W&B has this run, and the head, for the card of an export."""
        run = self._run()
        if run.offline:
            place = {"run": run.id, "offline": True}
        else:
            place = {"run": run.url} | ({"artifact": f"{run.entity}/{run.project}/{artifact}"} if artifact else {})
        write_json(self.folder / PLACE_FILE, place)

    def _log_sources(self, find_sources):
        """Target and data as artifacts that this run uses: described and pointed at, not uploaded."""
        import wandb

        self.sources = find_sources()
        for source in self.sources:
            artifact = wandb.Artifact(source.name, source.kind, metadata=source.metadata)
            with artifact.new_file("source.json") as file:  # a changed description is another version
                json.dump(source.metadata, file, indent=2)
            if source.uri:
                artifact.add_reference(source.uri, checksum=False)
            # Run.use_artifact is this call and a wait, which offline nobody answers.
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
    """Bytes of the files in and below a folder: of a head, an adapter/ too."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
