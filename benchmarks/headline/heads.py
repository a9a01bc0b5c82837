"""The second and third stage: answers of the target to training prompts, and heads trained on them, all for the same minutes.

Both run the project's own scripts, train/regenerate.py and the trainers, in this process. The trainers count steps, not minutes:
a trial of a few steps tells the rate, and so how many steps a head makes in its minutes. Start-up and compilation do not count.
"""

import itertools
import json
import shutil
import time
from importlib import import_module
from statistics import median

import torch

from ...evaluation.compare import hardware_name
from ...evaluation.timing import release

TRIAL_LINES = 10  # that a trial writes, of as many steps each


def answer_prompts(settings, work, device):
    """Let the target answer the training prompts, at temperature 1."""
    work.needs("target")
    regenerate = import_module("...train.regenerate", __package__)
    options = {"model": work.target, "output": work.answers, "temperature": 1, "seed": settings.seed}
    options |= {"max-tokens": settings.answer_tokens, "concurrency": settings.concurrency, "device": device.type}
    began = time.perf_counter()
    run_script(regenerate, [str(work.prompts), *words(options)])
    made = json.loads(work.answers.with_name(f"{work.answers.name}.made_from.json").read_text())
    seconds = time.perf_counter() - began
    release(device)
    work.keep("answers", "all", made["summary"] | {"seconds": round(seconds, 1), "hardware": hardware_name(device)})


def train_head(source, settings, work, device):
    """Train one head for its minutes, keep its figures."""
    work.needs("answers")
    trainer = import_module(f"...train.{source.trainer}", __package__)
    keys = {
        "target": work.target,
        "data": work.answers,
        "packed_data": work.folder / "packed",
        "seed": settings.seed,
        "row_length": settings.row_length,
        "batch_rows": settings.head_rows,
        "chunk_tokens": 8192 if device.type == "cuda" else 512,
        "eval_prompts": 0,
        "checkpoint_every": 0,
        "tracker": "none",
    }
    keys |= source.recipe(settings)
    trial, run = (work.heads / f"{source.slug}{end}" for end in ("-trial", ""))
    for folder in (trial, run):  # of a call that was killed
        shutil.rmtree(folder, ignore_errors=True)
    trial_steps = settings.trial_steps
    run_script(
        trainer,
        words(keys | {"output": trial, "max_steps": trial_steps, "log_every": max(trial_steps // TRIAL_LINES, 1)}),
    )
    steps = steps_within(60 * settings.head_minutes, train_lines(trial))
    shutil.rmtree(trial)
    release(device)
    print(f"{source.name}: {steps:,} steps, about {settings.head_minutes:.2f} minutes and a start", flush=True)
    # Six lines: reading a loss waits for the device.
    run_script(trainer, words(keys | {"output": run, "max_steps": steps, "log_every": max(steps // 6, 1)}))
    lines = train_lines(run)
    release(device)
    # The first line's time holds the compilation. At a rate r a line's tokens took tokens / r.
    later = [(b["tokens"] - a["tokens"], b["tokens_per_second"]) for a, b in itertools.pairwise(lines)]
    later = later or [(lines[-1]["tokens"], lines[-1]["tokens_per_second"])]
    rate = sum(tokens for tokens, _ in later) / sum(tokens / speed for tokens, speed in later)
    figures = {
        "name": source.name,
        "steps": steps,
        "tokens": lines[-1]["tokens"],
        "tokens_per_second": round(rate),
        "minutes": round(lines[-1]["tokens"] / rate / 60, 3),
        "loss": lines[-1]["loss"],
        "keys": source.recipe(settings),
        "hardware": hardware_name(device),
    }
    work.keep("heads", source.slug, figures)


def steps_within(seconds, lines):
    """How many steps, at least 2, a head makes in so many seconds.  lines: of its trial, some steps each

    The middle rate of the second half counts: the first steps compile, and a later one may, where a shape is new.
    """
    rate = median(line["tokens_per_second"] for line in lines[len(lines) // 2 :])
    return max(round(seconds * rate * lines[-1]["step"] / lines[-1]["tokens"]), 2)


def train_lines(run):
    """The lines of a run's metrics.jsonl about steps."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def words(keys):
    """Keys and values as a command line."""
    return [str(word) for name, value in keys.items() for word in (f"--{name}", value)]


def run_script(module, argv):
    """Run a script of train/ here. KeyboardInterrupt if a signal ended it early."""
    try:
        status = module.main(argv)
    finally:
        torch._dynamo.reset()  # else the compiled attention of many runs comes to its limit of shapes, and runs uncompiled
    if status:
        raise KeyboardInterrupt(f"{module.__name__} was ended by signal {status - 128}")
