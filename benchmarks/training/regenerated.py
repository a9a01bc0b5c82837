"""Measure the benefit of the target's own answers: train the same head on the data's answers and on regenerated ones, and compare.

    python benchmarks/training/regenerated.py --output found.json
    python benchmarks/training/regenerated.py --config configs/eagle3-quickstart.yaml --trainer eagle3 \\
        --temperature 1 --temperature 0

All sides hold the same conversations (those with an answer, cut to the turns that every side has). All heads are trained for the
same number of steps and rows, so on nearly as many tokens, and from the same seeds. Acceptance is the engine's, on the target's
held-out prompts, which no side was trained on, with 95 % intervals over the prompts. --seeds trains each side several times, to
show how much training varies. Results are kept in --work, and existing ones are not made again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from headstart.evaluation.results import Report, command_line
from headstart.train.data.conversations import load_conversations, write_conversations

ROOT = Path(__file__).resolve().parents[2]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "quickstart.yaml"), help="recipe of the head")
    parser.add_argument("--trainer", default="medusa", choices=("medusa", "mlp_speculator", "eagle", "eagle3"))
    parser.add_argument(
        "--target", default=str(ROOT / "assets" / "stdlib-coder"), help="with a heldout.jsonl beside it"
    )
    parser.add_argument("--data", default="stdlib", help="data set whose answers are compared (default stdlib)")
    parser.add_argument("--num-conversations", type=int, help="number of its conversations (default: all)")
    parser.add_argument(
        "--temperature",
        type=float,
        action="append",
        help="temperature of the regeneration; may be given again (default: 1)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="longest regenerated answer in tokens (default 512)"
    )
    parser.add_argument("--steps", type=int, default=500, help="optimiser steps per head (default 500)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings per side (default 3)")
    parser.add_argument("--requests", type=int, default=96, help="per head and serving temperature (default 96)")
    parser.add_argument("--tokens", type=int, default=96, help="of each of them (default 96)")
    parser.add_argument(
        "--work", default="runs/regenerated", help="folder for data and runs (default runs/regenerated)"
    )
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = command_line("benchmarks/training/regenerated.py", arguments)
    report = Report("regenerated", {}, device, command, vars(options), options.output)
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    check_same_options(options, work / "options.json")
    sides = write_sides(options, work)
    rows = []
    for side, data in sides.items():
        for seed in range(options.seeds):
            run = train(options, work, side, data, seed)
            for row in measure(options, run):
                rows.append({"side": side, "seed": seed, **row, **describe_training(run)})
    for row in rows:
        print(
            f"{row['side']:20} seed {row['seed']}  served at T {row['temperature']:g}  {row['draft']:22} "
            f"{row['acceptance_length']:.3f} tokens per step, 95 % {row['low']:.3f} to {row['high']:.3f} "
            f"(trained on {row['trained_tokens']:,} tokens)"
        )
    for line in compare(rows):
        print(line)
    report.rows = rows
    report.finish()
    return 0


def check_same_options(options, path):
    """ValueError if the folder holds results of other options; trainings may be added to existing ones."""
    own = {name: value for name, value in vars(options).items() if name not in ("seeds", "output")}
    if path.exists() and json.loads(path.read_text()) != own:
        raise ValueError(f"{path.parent} holds what other options made ({path}): name another folder with --work")
    path.write_text(json.dumps(own, indent=1) + "\n")


def write_sides(options, work):
    """Write one data file per side.  -> {name of the side: its file}

    Sides: the regenerated answers, one side per temperature, and the data's own answers to the same turns.
    """
    regenerated = {}
    for temperature in options.temperature or (1.0,):
        path = work / f"regenerated-{temperature:g}.jsonl"
        words = [options.data, "--model", options.target, "--output", path, "--temperature", temperature]
        words += ["--max-tokens", options.max_tokens]
        if options.num_conversations:
            words += ["--num-conversations", options.num_conversations]
        script("train/regenerate.py", *words)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        regenerated[f"regenerated, T {temperature:g}"] = {line["conversation"]: line["messages"] for line in lines}
    shared = set.intersection(*(set(answers) for answers in regenerated.values()))
    conversations = load_conversations(options.data)
    # Every conversation is cut to its shortest side, and left out if regeneration left out its first turn.
    length = {place: min(len(answers[place]) for answers in regenerated.values()) for place in shared}
    kept = [
        place
        for place in sorted(shared)
        if [one["role"] for one in conversations[place][: length[place]]]
        == [one["role"] for one in next(iter(regenerated.values()))[place][: length[place]]]
    ]
    sides = {"original": dict(enumerate(conversations)), **regenerated}
    paths = {}
    for name, answers in sides.items():
        paths[name] = work / f"{name.replace(', T ', '-')}.side.jsonl"
        write_conversations(paths[name], [answers[place][: length[place]] for place in kept])
    print(f"{len(kept)} conversations on every side", file=sys.stderr)
    return paths


def train(options, work, side, data, seed):
    """The run folder of one training, which runs if the folder does not exist yet."""
    run = work / f"{data.name.removesuffix('.side.jsonl')}-seed-{seed}"
    if not (run / "head").is_dir():
        keys = {"config": options.config, "target": options.target, "data": data, "output": run, "seed": seed}
        keys |= {
            "max_steps": options.steps,
            "max_tokens": 0,
            "eval_prompts": 0,
            "checkpoint_every": 0,
            "tracker": "none",
        }
        if run.exists():
            keys["resume"] = True
        script(f"train/{options.trainer}.py", *(word for name, value in keys.items() for word in (f"--{name}", value)))
    return run


def measure(options, run):
    """Rows of benchmarks/training/heads.py for one head: a chain and the trees, at serving temperatures 0 and 1."""
    found = run / "acceptance-rows.json"
    if not found.exists():
        words = ["--head", f"head={run}", "--target", options.target, "--output", found]
        script("benchmarks/training/heads.py", *words, "--requests", options.requests, "--max-tokens", options.tokens)
    return json.loads(found.read_text())["rows"]


def describe_training(run):
    """The number of tokens that a run was trained on, and its last loss."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    return {"trained_steps": last["step"], "trained_tokens": last["tokens"], "final_loss": last["loss"]}


def compare(rows):
    """Print each side's mean over the seeds, with least and greatest, per serving temperature and draft."""
    kinds = dict.fromkeys((row["temperature"], row["draft"].split(" of ")[0]) for row in rows)
    for temperature, draft in kinds:
        for side in dict.fromkeys(row["side"] for row in rows):
            found = [
                row["acceptance_length"]
                for row in rows
                if (row["side"], row["temperature"], row["draft"].split(" of ")[0]) == (side, temperature, draft)
            ]
            mean = sum(found) / len(found)
            yield (
                f"served at T {temperature:g}, {draft:12} {side:20} {mean:.3f} tokens per step over {len(found)} trainings "
                f"({min(found):.3f} to {max(found):.3f})"
            )


def script(path, *words):
    """Run one of our scripts; its failure is an error here."""
    subprocess.run([sys.executable, str(ROOT / path), *map(str, words)], check=True)


if __name__ == "__main__":
    sys.exit(main())
