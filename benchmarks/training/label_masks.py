"""Compare two ways to choose the labels of EAGLE heads: by the label's own place, as here, and by its root's, as in the originals.

    python benchmarks/training/label_masks.py --steps 600 --seed 0 --seed 1 --seed 2 --jobs 12 --output label-masks

By its own place a token is a label if the assistant wrote it. By its root's place it is one if the assistant wrote the token two
places before: the first two tokens of every answer are no labels then, and two after its end are. Each recipe is trained with both
on the same rows, steps and seeds; the engine measures tokens per step of a chain on held-out prompts, with 95 % intervals.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import torch
from tqdm import tqdm

from headstart.benchmarks.training.heads import TARGET, speculating
from headstart.evaluation.acceptance import acceptance_interval
from headstart.evaluation.results import Report, command_line
from headstart.inference.llm import LLM
from headstart.inference.prompt_files import read_prompts, render_prompt
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.options import SpeculativeOptions
from headstart.inference.speculation.proposers import find_proposer

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("eagle", "eagle3")
SHIFTS = {"label": 0, "root": 2}  # places from the token that decides to the label
CHAIN = 4


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimiser steps (default 150)")
    parser.add_argument("--max-tokens", type=int, default=600_000, help="tokens to train on (default 600000)")
    parser.add_argument("--seed", type=int, action="append", help="may be given again (default: 0, 1 and 2)")
    parser.add_argument("--requests", type=int, default=192, help="requests per head and temperature (default 192)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default 1)")
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    parser.add_argument("--train", nargs=3, metavar=("FAMILY", "MASK", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    seeds = options.seed or [0, 1, 2]
    if options.train:
        return train(*options.train, seeds[0], options)
    with tempfile.TemporaryDirectory() as scratch:
        runs = {
            (family, mask, seed): Path(scratch, f"{family}-{mask}-{seed}")
            for seed in seeds
            for family in FAMILIES
            for mask in SHIFTS
        }
        with ThreadPoolExecutor(options.jobs) as pool:
            done = pool.map(lambda run: train_apart(*run, options), runs.items())
            list(tqdm(done, "training", len(runs), unit="head"))
        base = LLM(str(TARGET), max_num_seqs=1, num_gpu_blocks_override=32, enforce_eager=True)
        command = command_line("benchmarks/training/label_masks.py", arguments)
        report = Report("label-masks", {}, base.device, command, vars(options), options.output)
        prompts = [render_prompt(base.tokenizer, prompt) for prompt in read_prompts(TARGET / "heldout.jsonl")]
        for (family, mask, seed), run in runs.items():
            source = find_proposer(SpeculativeOptions(model=str(run)), base.config)
            for temperature in (0.0, 1.0):
                row = {"head": family, "mask": mask, "seed": seed, "temperature": temperature}
                row |= measure(base, source, prompts, temperature, options.requests)
                report.rows.append(row)
                print(
                    f"{family:8} {mask:6} seed {seed}  T {temperature:g}  {row['acceptance_length']:.3f} tokens per step, "
                    f"95 % {row['low']:.3f} to {row['high']:.3f}",
                    flush=True,
                )
        report.finish()
    return 0


def train_apart(run, path, options):
    """Train one head in a process of its own.  run: (family, mask, seed)"""
    family, mask, seed = run
    command = [sys.executable, __file__, "--train", family, mask, str(path), "--seed", str(seed)]
    command += ["--steps", str(options.steps), "--max-tokens", str(options.max_tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"training of {run} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def train(family, mask, run, seed, options):
    """Train one head on documents whose labels are chosen by `mask`."""
    script = import_module(f"headstart.train.{family}")
    load, shift = script.load_documents, SHIFTS[mask]

    def load_documents(*given):
        documents, held_out = load(*given)
        return [(ids, ([False] * shift + list(marks))[: len(ids)]) for ids, marks in documents], held_out

    script.load_documents = load_documents
    given = {
        "output": run,
        "seed": seed,
        "max_steps": options.steps,
        "max_tokens": options.max_tokens,
        "batch_rows": 16,
        "eval_every": 0,
        "checkpoint_every": 0,
    }
    if family == "eagle3":
        given["draft_vocab_size"] = 0  # the labels would choose it
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return script.main(["--config", str(ROOT / "configs" / f"{family}-quickstart.yaml"), *words])


def measure(base, source, prompts, temperature, requests):
    """Acceptance length of a chain on held-out prompts, to the ends of the answers, and its interval."""
    llm = speculating(base, source, "chain", CHAIN)
    params = [SamplingParams(temperature=temperature, max_tokens=128, seed=i) for i in range(requests)]
    return acceptance_interval(llm.generate([prompts[i % len(prompts)] for i in range(requests)], params))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
