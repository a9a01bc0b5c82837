"""A checkout of the project as unchanged.py drives and records it: its programs, its files, and the masks for both."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

# (pattern, replacement) for text that differs between two records of the same code. The four folders are masked first.
MASKS = [
    (r"\d{8}_\d{6}", "<time>"),  # date: W&B's folders
    (r"\b20\d\d-\d\d-\d\d\b", "<date>"),  # date: model cards, benchmark files
    (r"offline-run-<time>-\w{8}", "<wandb run>"),  # W&B draws a run's id at random
    (r"(?m)^(\s*run: )[0-9a-z]{8}$", r"\1<wandb id>"),  # the same in model cards
    (r"[\d,]+ MB free", "<disk> MB free"),  # machine: note of the feature cache
    (r"[\d,.]+ tokens/s", "<speed> tokens/s"),  # speed
    (r"\b\d+\.\d+x", "<speed>x"),  # speed: generate --compare
    (r"\b\d+(\.\d+)? (s|ms|seconds)\b", "<time> s"),  # speed
    (r" on [^,\n|]+, \d+ threads?", " on <machine>"),  # machine: model cards
    (r"<h2>Throughput and memory</h2>.*", "<h2>Throughput and memory</h2><masked>"),  # speed: charts of the report page
    (r"step-\d+, after step \d+", "<checkpoint>"),  # speed: when the run was killed; the resumed run is the same
    (r"(<\w+>)?/\S+/site-packages/", "<site-packages>/"),  # place: warnings of libraries
    (r"/tmp/[\w.-]+", "<tmp>"),  # place: temporary files
    (r"resumed_from_old", "resumed"),  # place: our own name of the folder
]
# Keys of JSON data whose values are left out, for the same reasons; the keys themselves are recorded.
MASKED_KEYS = {"tokens_per_second", "speedup", "prefill_seconds", "decode_seconds", "decode_tokens_per_second"}  # speed
MASKED_KEYS |= {"peak_memory_gib", "hardware", "date"}  # machine, date
MASKED_KEYS |= {"transformers_version", "written_by"}  # versions
MASKED_KEYS |= {"run"}  # W&B's random id
# Printed lines that are left out: progress bars, and the note that a run of the old record goes on in another folder.
LEFT_OUT = re.compile(r"\d+%\||\bit/s\]|^\s*$|changed since the run was started: output '[^']*' -> '[^']*'$")
SMALL = 64 * 1024


class Checkout:
    """A checkout, and the folder where it is recorded."""

    def __init__(self, given):
        self.root, self.output = Path(given.checkout).resolve(), Path(given.output).resolve()
        self.work, self.old = self.output / "work", given.old_record and Path(given.old_record).resolve() / "work"
        self.bin = Path(os.path.abspath(given.python or self.root / ".venv/bin/python")).parent
        self.steps, self.jobs = given.steps, given.jobs
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
        self.environment |= dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", COLUMNS="120")
        self.environment |= dict(WANDB_MODE="offline", TQDM_MININTERVAL="20", PYTHONDONTWRITEBYTECODE="1")
        found = self.run("python", "-c", "import headstart; print(headstart.__file__)")
        if found.returncode or not Path(found.stdout.strip()).resolve().is_relative_to(self.root):
            fail(f"`import headstart` in {self.bin} does not find {self.root}: {found.stdout}{found.stderr[-500:]}")

    def run(self, program, *arguments):
        """The finished process of a program of the checkout's environment, run in the checkout's root."""
        how = dict(cwd=self.root, env=self.environment, capture_output=True, text=True, errors="replace")
        return subprocess.run([self.bin / program, *arguments], **how)

    def told(self, *command):
        """Output and status of a command, masked, without progress bars."""
        done = self.run(*command)
        return {"status": done.returncode, "stdout": self.lines(done.stdout), "stderr": self.lines(done.stderr)}

    def lines(self, text):
        lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "\n", text).replace("\r", "\n").split("\n")
        lines = [re.sub(r"^.*?(?=\[\w+\] )", "", line) if "it/s" in line else line for line in lines]
        return [self.masked(line.rstrip()) for line in lines if not LEFT_OUT.search(line)]

    def masked(self, data):
        """A text, or JSON data, masked."""
        if isinstance(data, dict):
            return {key: "<masked>" if key in MASKED_KEYS else self.masked(value) for key, value in data.items()}
        if isinstance(data, list):
            return [self.masked(value) for value in data]
        if not isinstance(data, str):
            return data
        for place, name in ((self.work, "work"), (self.old, "work"), (self.bin, "bin"), (self.root, "checkout")):
            data = data.replace(str(place), f"<{name}>") if place else data
        for pattern, instead in MASKS:
            data = re.sub(pattern, instead, data)
        return data

    def place(self, part):
        """The part's own folder, emptied."""
        shutil.rmtree(self.work / part, ignore_errors=True)
        (self.work / part).mkdir(parents=True)
        return self.work / part

    def run_of(self, recipe):
        return self.work / "train" / recipe / "fresh"

    def folder(self, path):
        """{name: content} of every file below; None if there is no such folder."""
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        return {str(file.relative_to(path)): self.file(file) for file in files} if path.is_dir() else None

    def file(self, path):
        """Record of a file: a checksum per tensor, the content of a small text, else one checksum."""
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start])
            about = {"__metadata__": header.pop("__metadata__", None)}
            for name, entry in header.items():
                begin, end = (start + offset for offset in entry["data_offsets"])
                about[name] = f"{entry['dtype']} {entry['shape']} {sha(data[begin:end])}"
            return about
        if path.suffix == ".pt":  # torch's: the parts of the archive, whatever the archive's name
            with zipfile.ZipFile(path) as archive:
                return {name.partition("/")[2]: sha(archive.read(name)) for name in archive.namelist()}
        try:
            text = self.masked(data.decode("utf-8"))
        except UnicodeDecodeError:
            return sha(data)
        if path.suffix == ".jsonl":
            return [self.masked(json.loads(line)) for line in text.splitlines()]
        if len(text) > SMALL or path.suffix == ".svg":
            return sha(text.encode())
        return self.masked(json.loads(text)) if path.suffix == ".json" else text.split("\n")


def sha(data):
    return hashlib.sha256(data).hexdigest()


def fail(text):
    print(f"unchanged.py: {text}", file=sys.stderr)
    raise SystemExit(2)
