"""Medusa-2 against Medusa-1 at equal data: N steps of heads alone; N/2 of them, then N/2 steps of heads and adapter together.

    python benchmarks/training/joint.py --steps 2000 --output runs/joint --batch_rows 64 --row_length 1024 --data installed
    python benchmarks/training/joint.py --steps 40 --output runs/joint-small --requests 16 --max-tokens 32 --batch_rows 4

Options that it does not know are keys of train/medusa.py and go to all three runs (under --output: heads, half, joint). Then tokens
per step of a chain on held-out prompts, each arm with its own target, with 95 % intervals; and the loss of the adapted and of the
frozen target on held-out answers. A complete run is kept and used again. One JSON line last.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path

import torch
import yaml

from headstart.evaluation.acceptance import acceptance_interval
from headstart.evaluation.compare import hardware_name
from headstart.inference.engine.sampling import SamplingParams
from headstart.inference.llm import LLM
from headstart.inference.prompt_files import read_prompts, render_prompt
from headstart.train import medusa
from headstart.train.run.recipe import parse_recipe, resolved_values

TARGET = Path(__file__).resolve().parents[2] / "assets" / "stdlib-coder"
MOST_WORSE = 0.01  # what the adapted target's held-out loss may rise by


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, required=True, help="optimiser steps of either arm, an even number")
    parser.add_argument("--output", required=True, help="the folder for the three runs and found.json")
    parser.add_argument("--target", default=str(TARGET), help="with a heldout.jsonl in it (default: the embedded one)")
    parser.add_argument("--requests", type=int, default=128, help="per arm and temperature (default 128)")
    parser.add_argument("--max-tokens", type=int, default=96, help="new tokens per request (default 96)")
    parser.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0 and 1)")
    options, keys = parser.parse_known_args(arguments)
    if options.steps < 2 or options.steps % 2:
        parser.error(f"--steps must be an even number of at least 2, got {options.steps}")
    folder, half = Path(options.output), options.steps // 2
    shared = ["--target", options.target, "--data", "stdlib", "--tracker", "none", "--lr", "2e-3", "--eval_every", "0"]
    shared += ["--checkpoint_every", "0", "--eval_prompts", "64"]
    runs = {name: folder / name for name in ("heads", "half", "joint")}
    train(runs["heads"], options.steps, [*shared, *keys])
    train(runs["half"], half, [*shared, *keys])
    going_on = ["--stage", "joint", "--start_from", str(runs["half"])]
    train(runs["joint"], half, [*shared, "--seed", "1", *keys, *going_on])  # other rows than the first half

    rows, prompts, device = [], read_prompts(Path(options.target) / "heldout.jsonl"), None
    for name, adapter in (("heads", None), ("half", None), ("joint", runs["joint"])):
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        speculative = {"model": runs[name], "tree": "chain"}
        llm = LLM(options.target, adapter=adapter, max_num_seqs=16, max_model_len=1024, speculative_config=speculative)
        device = llm.device
        rendered = [render_prompt(llm.tokenizer, prompt) for prompt in prompts]
        for temperature in options.temperature or (0.0, 1.0):
            params = [
                SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=i, ignore_eos=True)
                for i in range(options.requests)
            ]
            given = [rendered[i % len(rendered)] for i in range(options.requests)]
            found = acceptance_interval(llm.generate(given, params, use_tqdm=True))
            rows.append({"run": name, "temperature": temperature} | found)
            print(
                f"{name:6} T {temperature:g}  {found['acceptance_length']:.3f} tokens per step, 95 % {found['low']:.3f} to "
                f"{found['high']:.3f} ({found['steps']} steps)",
                flush=True,
            )
    measured = json.loads((runs["joint"] / "acceptance.json").read_text())
    adapted, frozen = measured["heldout_loss"], measured["frozen_heldout_loss"]
    print(f"held-out loss: adapted {adapted:.4f}, frozen {frozen:.4f} ({100 * (adapted / frozen - 1):+.2f} %)")
    lengths = {(row["run"], row["temperature"]): row for row in rows}
    gains = [lengths["joint", heat]["low"] > row["high"] for (run, heat), row in lengths.items() if run == "heads"]
    result = {
        "hardware": hardware_name(device),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "command": " ".join(
            ["python", "benchmarks/training/joint.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "steps": options.steps,
        "rows": rows,
        "heldout_loss": adapted,
        "frozen_heldout_loss": frozen,
        "heldout_tokens": measured["heldout_tokens"],
        "accepts_more": all(gains),  # at every temperature, the intervals apart
        "target_is_kept": adapted <= (1 + MOST_WORSE) * frozen,
    }
    (folder / "found.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def train(output, steps, keys):
    """One run, unless it is there and complete; one that was stopped goes on. ValueError for one of other keys."""
    arguments = [*keys, "--output", str(output), "--max_steps", str(steps)]
    if (output / "config.yaml").is_file():
        wanted = resolved_values(parse_recipe(medusa.Recipe, arguments, ""))
        found = yaml.safe_load((output / "config.yaml").read_text())
        differing = [name for name in wanted if name != "autocast" and found.get(name) != wanted[name]]
        if differing:
            raise SystemExit(
                f"error: {output} is a run with other values of {', '.join(differing)}: name another --output"
            )
        if (output / "head").is_dir():
            return
        arguments.append("--resume")
    status = medusa.main(arguments)
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    sys.exit(main())
