"""Prove that a run survives kill -9: kill it at random moments, go on with --resume, compare it bit by bit with an undisturbed run.

    python benchmarks/proofs/survival.py --kills 20 --output runs/survival -- train/medusa.py --config configs/quickstart.yaml
    python benchmarks/proofs/survival.py --kills 20 --output runs/survival --forked -- train/medusa.py ...     seconds, not minutes

Give a training script and its keys after `--`; this script sets `output` and `resume`. The undisturbed run comes first. Then the
same run is killed after a random time, from before its folder exists to after its last step, and started again with --resume until
it is finished. Further runs follow until the number of kills is reached. On a CPU set `autocast`: `auto` may differ between starts.

--forked, for a CPU: this process imports the script's modules once and forks, to save the time of imports. A run is killed as it is
about to open, rename or remove its n-th file or folder, with a random n: a timer would hardly ever hit these moments.

--while-writing, a kind of --forked: a run is killed while its thread writes a checkpoint, a random time after a random one was
begun. Only kills that left an unfinished checkpoint behind are counted. `steps_ahead` says how many steps the training had made
since: give `log_every` 1. With `checkpoint_checksums` all bytes of the checkpoints are compared after a kill, else their sizes.

After every kill, all checkpoints and all shards of the feature cache must be whole. A finished run must equal the undisturbed run
in every line of metrics.jsonl (without timings), in acceptance.json, in the optimiser's state and in the bytes of head/ and best/,
and it must leave no unfinished file. Exits with 1 otherwise. The last line is JSON. It does not cut the power: data that the system
has not yet written to the disk are not lost.
"""

import argparse
import importlib
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from headstart.evaluation.results import Report, command_line
from headstart.train.run.checkpointing import find_damage, list_checkpoints
from headstart.train.teacher.feature_cache import TOLD, checksum_of

CLOCK = ("tokens_per_second", "peak_memory_gib")  # figures that differ between equal runs
NOTHING_THERE = "there is no run in"  # error of a run that is resumed before it has written anything


class Killed(Exception):
    """The run was killed, as planned."""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="a new folder: whole/, killed-0/ ..., log.txt")
    parser.add_argument("--forked", action="store_true")
    parser.add_argument("--while-writing", action="store_true")
    parser.add_argument(
        "--result", help="file for the JSON object; a bare name becomes benchmarks/results/<date>-<name>.json"
    )
    parser.add_argument("script", nargs="+", help="after --: the training script and its keys")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True)
    launch = WhileWriting(options) if options.while_writing else Forked(options) if options.forked else Started(options)
    whole = options.output / "whole"
    begun = time.perf_counter()
    if launch(whole, resume=False, moment=None):
        return report_failure(launch, "the undisturbed run failed")
    seconds = time.perf_counter() - begun
    span = launch.length or seconds  # files touched, checkpoints begun, or seconds
    print(f"undisturbed: {seconds:.1f} s; moments up to {span:.4g}", file=sys.stderr)

    rng, moments, ahead, runs = random.Random(options.seed), [], [], 0
    while len(moments) < options.kills:
        run, finished, there = options.output / f"killed-{runs}", False, False
        runs += 1
        begun, spared = time.perf_counter(), True
        while not finished:
            moment = rng.uniform(0, span) if len(moments) < options.kills else None
            try:
                status = launch(run, resume=there, moment=moment)
            except Killed:
                there, spared = True, False
                begun_at = unfinished(run)
                if begun_at or not options.while_writing:
                    moments.append(moment)
                    ahead.append(newest_line(run) - begun_at[-1] if begun_at else 0)
                wrong = look_at(run)
                print(f"killed {run.name} at {moment:.4g}: {state_of(run)}", file=sys.stderr)
                if wrong:
                    return report_failure(launch, f"after a kill at {moment}: {wrong}")
                continue
            if status and there and NOTHING_THERE in launch.last_line():
                there = False  # the error asks to leave --resume out
                continue
            if status:
                return report_failure(launch, f"{run} cannot go on after the kills at {moments}")
            finished = True
        wrong = difference(whole, run)
        if wrong:
            return report_failure(launch, f"{run} differs from the undisturbed run: {wrong}")
        print(f"{run.name}: the same bits", file=sys.stderr)
        if spared and not launch.length:
            # The first run fills caches of compiled kernels; later ones are shorter, and most moments would lie after their end.
            span = min(span, time.perf_counter() - begun)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = command_line("benchmarks/proofs/survival.py", arguments)
    settings = {"script": options.script, "forked": options.forked, "while_writing": options.while_writing}
    report = Report("survival", {}, device, command, settings, output=options.result)
    figures = {"seconds": round(seconds, 1), "runs": runs, "kills": len(moments)}
    if options.while_writing:
        figures |= {"steps_ahead": ahead, "seconds_of_writing": round(launch.writing, 3)}
    report.rows.append(figures | {"moments": [round(m, 2) for m in moments], "same": True})
    report.finish()
    return 0


def report_failure(launch, text):
    print(f"{text}\n--- {launch.log}:\n{launch.said()[-3000:]}", file=sys.stderr)
    return 1


class Started:
    """Runs the script in a separate process, as a user does, and kills it after `moment` seconds."""

    length = None

    def __init__(self, options):
        self.words, self.log = options.script, options.output / "log.txt"

    def __call__(self, run, resume, moment):
        """Run the script. Returns its status, or raises Killed."""
        command = [sys.executable, *self.words, "--output", str(run), *(["--resume"] if resume else [])]
        with self.log.open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                return process.wait(timeout=moment)
            except subprocess.TimeoutExpired:
                raise Killed from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def said(self):
        return self.log.read_text(errors="replace")

    def last_line(self):
        return (self.said().strip().splitlines() or [""])[-1]


class Forked(Started):
    """Runs the script in a fork of this process, and kills it before it touches its `moment`-th file or folder of the run."""

    def __init__(self, options):
        super().__init__(options)
        importlib.import_module(f"headstart.train.{Path(options.script[0]).stem}")
        importlib.import_module("transformers.models.llama.modeling_llama")
        # Threads of a parallel loop do not outlast a fork, and the fork would wait for them: this process computes on one.
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __call__(self, run, resume, moment):
        counted, events = run.parent / "touched", 0

        def watch(event, details):
            nonlocal events
            if not event.startswith(("open", "os.", "shutil.")) or not details or event == "os.listdir":
                return
            if not isinstance(details[0], str | os.PathLike) or str(run) not in str(details[0]):
                return
            events += 1
            if moment is not None and events > moment:
                os.kill(os.getpid(), signal.SIGKILL)

        child = self.fork(run, resume, watch, lambda: counted.write_text(str(events)))
        status = os.waitpid(child, 0)[1]
        return self.end(status, int(counted.read_text()) if self.length is None else None)

    def end(self, status, length):
        """The exit status of a fork; Killed if it was killed.  length: of the run, kept if it is the first"""
        status = os.waitstatus_to_exitcode(status)
        if status == -signal.SIGKILL:
            raise Killed
        self.length = self.length or length
        return status

    def fork(self, run, resume, watch, at_end):
        """The process id of a fork that runs the script under the audit hook `watch`, and calls at_end() last."""
        sys.stderr.flush()
        child = os.fork()
        if not child:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = [*self.words, "--output", str(run), *(["--resume"] if resume else [])]
            status = 1
            sys.addaudithook(watch)
            torch.set_num_threads(self.threads)
            try:
                runpy.run_path(self.words[0], run_name="__main__")
            except SystemExit as left:
                status = left.code or 0
            finally:
                at_end()
                os._exit(status)
        return child


class WhileWriting(Forked):
    """Runs the script in a fork, and kills it while it writes a checkpoint.

    The whole part of `moment` is the number of checkpoints begun before, the rest the share of the time that a write takes.
    """

    writing = 0.0  # seconds, the longest of the undisturbed run

    def __call__(self, run, resume, moment):
        child = self.fork(run, resume, lambda *_: None, lambda: None)
        leftover = set(staging_folders(run))  # of an earlier kill
        begun = {}  # when each was seen first
        while True:
            now = time.perf_counter()
            for name in set(staging_folders(run)) - leftover:
                begun.setdefault(name, now)
                if moment is None:
                    self.writing = max(self.writing, now - begun[name])
            if moment is not None and len(begun) > int(moment):
                time.sleep((moment % 1) * self.writing)
                os.kill(child, signal.SIGKILL)
                break
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return self.end(status, len(begun))
            time.sleep(0.001)
        return self.end(os.waitpid(child, 0)[1], len(begun))


def staging_folders(run):
    """Names of the checkpoints that are being written, or were when the run was killed."""
    checkpoints = Path(run, "checkpoints")
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    return sorted(name for name in names if re.fullmatch(r"\.+step-\d+.*\.partial-\w+", name))


def unfinished(run):
    """Steps of the checkpoints that a kill left unfinished."""
    return sorted(int(re.search(r"step-(\d+)", name)[1]) for name in staging_folders(run))


def newest_line(run):
    """The step of the last whole line of metrics.jsonl."""
    path = Path(run, "metrics.jsonl")
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def state_of(run):
    """The progress of a run, in words."""
    if not run.exists():
        return "there is no folder"
    checkpoints = [path.name for path in list_checkpoints(run)]
    return ", ".join(sorted(path.name for path in run.iterdir())) + f"; {' '.join(checkpoints[-1:])}"


def look_at(run):
    """The damaged files among all that a run would read; empty if there are none."""
    for checkpoint in list_checkpoints(run):
        if damage := find_damage(checkpoint):
            return damage
    for shard in run.glob("features/shard-*.safetensors"):
        try:
            with safe_open(shard, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if str(checksum_of(tensors)) != file.metadata()[TOLD].partition(" ")[2]:
                    return f"{shard} does not match its checksum"
        except SafetensorError as error:
            return f"{shard}: {error}"
    return ""


def difference(whole, run):
    """The differences of a finished run from the undisturbed one; empty if there are none."""
    for name in ("metrics.jsonl", "acceptance.json"):
        one, other = ([without_clock(line) for line in read_lines(folder / name)] for folder in (whole, run))
        if one != other:
            return f"{name}: {next((pair for pair in zip(one, other) if pair[0] != pair[1]), (len(one), len(other)))}"
    for name in ("head", "best"):
        one, other = (
            {p.relative_to(f): p.read_bytes() for p in (f / name).rglob("*") if p.is_file()} for f in (whole, run)
        )
        if one != other:
            return f"{name}/: {sorted(map(str, one))}, {sorted(map(str, other))}"
    one, other = (
        torch.load(list_checkpoints(f)[-1] / "optimizer.pt", weights_only=True)["state"] for f in (whole, run)
    )
    if any(not torch.equal(value, other[i][name]) for i, entry in one.items() for name, value in entry.items()):
        return "optimizer.pt"
    names = [path.relative_to(run) for path in run.rglob("*")]
    hidden = [p for p in names if p.parts[0] != "wandb" and (p.name.startswith(".") or ".partial" in p.name)]
    return f"left behind: {', '.join(map(str, hidden))}" if hidden else ""


def read_lines(path):
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def without_clock(line):
    return {name: value for name, value in line.items() if name not in CLOCK}


if __name__ == "__main__":
    sys.exit(main())
