"""Training on several GPUs: tokens per second, the loss curve beside one GPU's, and a 70B-shaped target divided with FSDP2.

    python benchmarks/training/scaling.py --gpus 1,2,4 --output scaling-h200
    python benchmarks/training/scaling.py --gpus 1,2 --cpu --shape SMALL --big SMALL --rows 2 --row-length 64    # SMALL/config.json

For each number of processes it runs train/medusa.py under configs/accelerate twice. `speed` has --rows rows per process and
optimiser step, so the step grows with the processes. `curve` has the same rows per step for any number, and its loss is compared
step by step with that of the first number. Then both run under fsdp2.yaml on the greatest number, and there, for a few steps, four
heads on a target of the shape --big, whose parts are made on the devices. Weights and texts are random, which does not change the
speed. It measures no acceptance.

There may be more processes than GPUs: they share them as if on several machines. Then only the curve counts; the speed is that of
sharing, and of NCCL over this host's network stack.
"""

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from launch_nodes import launch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.benchmarks.shape import config_of_shape
from headstart.evaluation.results import Report, command_line, decimals, plain
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train import medusa
from headstart.train.loss.distillation import Objective, accumulate_gradients, find_labels
from headstart.train.loss.losses import Loss
from headstart.train.run.optimization import build_optimizer, finish_step
from headstart.train.run.stopping import leave_group
from headstart.train.teacher.features import FrozenTarget
from headstart.train.teacher.sharded_target import build_sharded

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "assets" / "stdlib-coder"
NUM_HEADS, WARM_UP = 4, 3
COLUMNS = {
    "run": ("run", 14, plain),
    "processes": ("processes", 9, plain),
    "gpus": ("GPUs", 4, plain),
    "tokens_per_second": ("tokens/s", 10, decimals(0)),
    "scaling": ("x one's", 8, decimals(2)),
    "gib": ("GiB each", 8, decimals(1)),
    "mean_residual": ("mean residual", 13, "{:.1e}".format),
    "max_residual": ("largest", 8, "{:.1e}".format),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus", default="1,2,4", help="numbers of processes, one per GPU while there are, rising (default 1,2,4)"
    )
    parser.add_argument(
        "--shape", default="llama-3-8b", help="shape of the target: a named shape or a folder's config.json"
    )
    parser.add_argument("--layers", type=int, default=8, help="number of its layers (default 8, for a smaller file)")
    parser.add_argument("--big", default="llama-3-70b", help="shape of the divided target; none: leave it out")
    parser.add_argument("--rows", type=int, default=4, help="rows per process and micro-step (default 4)")
    parser.add_argument("--row-length", type=int, default=2048, help="tokens per row (default 2048)")
    parser.add_argument("--steps", type=int, default=12, help="optimiser steps of each run (default 12)")
    parser.add_argument("--cpu", action="store_true", help="run processes on the CPU; the figures then mean nothing")
    parser.add_argument("--output", help="write the rows as JSON here; a bare name: into benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # what one launch does, as JSON
    options = parser.parse_args(arguments)
    if options.worker:
        return work(json.loads(options.worker))
    numbers = [int(word) for word in options.gpus.split(",")]
    if numbers != sorted(set(numbers)) or any(numbers[-1] % number for number in numbers):
        parser.error(f"--gpus must rise, and each number divide the last, got {options.gpus}")
    if not options.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU here: --cpu tries it in processes on the CPU")
    if not options.cpu and any(number % min(number, torch.cuda.device_count()) for number in numbers):
        parser.error(f"--gpus: {options.gpus} processes do not share {torch.cuda.device_count()} GPUs evenly")
    command = command_line("benchmarks/training/scaling.py", arguments)
    device = "cpu" if options.cpu else "cuda"
    settings = {name: getattr(options, name) for name in ("shape", "layers", "big", "rows", "row_length", "steps")}
    report = Report("scaling", COLUMNS, device, command, settings, options.output)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        write_target(scratch / "target", options.shape, options.layers, device)
        write_texts(scratch / "texts.jsonl", 16 * numbers[-1] * options.rows, options.row_length)
        first = None
        launches = [("ddp", number) for number in numbers] + [("fsdp2", numbers[-1])]
        for kind, number in launches:
            runs = {name: scratch / f"{name}-{kind}-{number}" for name in ("speed", "curve")}
            job = {"runs": [], "big": None}
            for name, accumulate in (("speed", 1), ("curve", numbers[-1] // number)):
                job["runs"].append(recipe(scratch, runs[name], options, accumulate))
            if kind == "fsdp2" and options.big != "none":
                job["big"] = {"shape": options.big, "rows": 1, "length": options.row_length, "steps": options.steps}
            gpus = number if options.cpu else min(number, torch.cuda.device_count())
            found = run_job(kind, number, gpus, job, options.cpu)
            size = {"processes": number, "gpus": 0 if options.cpu else gpus}
            rows = [{"run": f"{name} {kind}"} | size | read_run(runs[name]) for name in runs]
            first = first or rows
            for row, reference, gib in zip(rows, first, found["gib"]):
                row["gib"] = gib
                row["scaling"] = row["tokens_per_second"] / reference["tokens_per_second"]
                if row["run"].startswith("curve"):
                    residuals = [b / a - 1 for a, b in zip(reference["losses"], row["losses"], strict=True)]
                    row |= {"mean_residual": statistics.fmean(residuals), "max_residual": max(map(abs, residuals))}
                report.add(row)
            if found["big"]:
                report.add({"run": "big fsdp2"} | size | found["big"])
    report.finish()
    return 0


def recipe(scratch, output, options, accumulate):
    """argv of train/medusa.py."""
    keys = {"target": scratch / "target", "data": scratch / "texts.jsonl", "output": output, "tracker": "none"}
    keys |= {"row_length": options.row_length, "batch_rows": options.rows, "accumulate": accumulate}
    # Heads with own lm_heads are files of 24 GiB with their moments, whose writing would take longer than the steps.
    keys |= {"num_heads": NUM_HEADS, "shared_lm_head": True}
    keys |= {"max_steps": options.steps, "log_every": 1, "eval_prompts": 0}
    keys |= {"checkpoint_every": 0, "warmup_ratio": 0.2}
    return [word for name, value in keys.items() for word in (f"--{name}", str(value))]


def write_target(folder, shape, layers, device):
    """Write a random model of the shape, with this number of layers, in bf16."""
    config = config_of_shape(shape)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def write_texts(path, count, length):
    """Write conversations that each fill a row; all but the question is supervised."""
    rng, words = random.Random(0), ["if", "for", "x", "y", "self", "return", "None", "(", ")", "=", "def"]
    with open(path, "w") as file:
        for _ in range(count):
            answer = " ".join(rng.choice(words) for _ in range(length))  # at least as many tokens
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def run_job(kind, number, gpus, job, on_cpu):
    """Do the job in `number` processes; returns the result of the first."""
    with tempfile.TemporaryDirectory() as folder:
        job = job | {"found": str(Path(folder, "found.json"))}
        config, environment = f"{kind}.yaml", {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
        if kind == "ddp" and number == 1:
            config, environment = "cpu.yaml" if on_cpu else "single.yaml", {}
        launch(config, number, gpus, [__file__, "--worker", json.dumps(job)], environment)
        return json.loads(Path(job["found"]).read_text())


def read_run(folder):
    """Losses of a run, and the median of its speeds once it is warm."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["tokens_per_second"] for line in lines[WARM_UP:]]
    return {"tokens_per_second": statistics.median(speeds), "losses": [line["loss"] for line in lines]}


# --- in the launched processes ---


def work(job):
    """One launch: the runs of train/medusa.py one after the other, then a few steps on a divided target, if one is named."""
    found = {"gib": [], "big": None}
    for argv in job["runs"]:
        reset_peak()
        if medusa.main(argv):
            return 1
        found["gib"].append(peak_gib())
    if job["big"]:
        found["big"] = train_big(**job["big"])
    if int(os.environ.get("RANK", "0")) == 0:
        Path(job["found"]).write_text(json.dumps(found))
    leave_group()
    return 0


def reset_peak():
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib():
    """The greatest memory that any rank's device held (on the CPU: that the process held since it began)."""
    if torch.cuda.is_available():
        return max(gather_object([torch.cuda.max_memory_allocated()])) / 2**30
    return max(gather_object([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])) / 2**30


def train_big(shape, rows, length, steps):
    """Figures of steps as in train/medusa.py, on a random target that no rank holds whole; heads have their own lm_heads."""
    reset_peak()
    accelerator, started = Accelerator(), time.perf_counter()
    device = accelerator.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = build_sharded(config_of_shape(shape), dtype, device).eval().requires_grad_(False)
    fill_randomly(model, accelerator.process_index)
    target = FrozenTarget(model)
    torch.manual_seed(0)
    with device:
        head = Medusa(MedusaConfig(target.hidden_size, target.vocab_size, NUM_HEADS))
    target.initialize(head)
    optimizer = build_optimizer(head, 0.0, 0.9, 0.999)
    objective = Objective(Loss("kl"), [0.8**k for k in range(NUM_HEADS)])
    generator = torch.Generator().manual_seed(accelerator.process_index)
    labels_per_step = rows * (length - 2) * accelerator.num_processes
    made, seconds, losses = time.perf_counter() - started, [], []
    for step in range(steps):
        begun = time.perf_counter()
        tokens = torch.randint(0, target.vocab_size, (rows, length), generator=generator).to(device)
        places = torch.arange(length, device=device).expand(rows, -1)
        documents, supervised = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
        features = target.features(tokens, places, documents)
        labels = find_labels(tokens, documents, supervised, NUM_HEADS)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            predictions = head.predict(features, tokens, places, documents, target.lm_head.weight)
            share = accumulate_gradients(
                predictions,
                features.flatten(0, 1),
                labels,
                lm_head=target.lm_head,
                objective=objective,
                num_labels=labels_per_step,
                chunk_tokens=1024,
            )
        lr = 1e-4 * (step + 1) / steps
        totals, _ = finish_step(head, optimizer, [share], accelerator=accelerator, lr=lr, max_norm=1.0)
        losses.append(totals[0, 0].item() / labels_per_step)  # .item() waits for the end of the step
        seconds.append(time.perf_counter() - begun)
    step_seconds = statistics.median(seconds[WARM_UP:])
    parts = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters())
    return {
        "tokens_per_second": rows * length * accelerator.num_processes / step_seconds,
        "gib": peak_gib(),
        "losses": losses,
        "target_parameters": sum(p.numel() for p in model.parameters()),
        "head_parameters": sum(p.numel() for p in head.parameters()),
        "target_gib_each": parts / 2**30,
        "seconds_to_build": made,
        "seconds_per_step": step_seconds,
    }


@torch.no_grad()
def fill_randomly(model, rank):
    """Draw weights of a usual size: divided ones per rank, whole ones equal on all ranks."""
    for place, parameter in enumerate(model.parameters()):
        divided = isinstance(parameter, DTensor)
        torch.manual_seed(1000 * place + (rank + 1 if divided else 0))
        local = parameter.to_local() if divided else parameter
        local.normal_(0, 0.02) if parameter.ndim > 1 else local.fill_(1)


if __name__ == "__main__":
    sys.exit(main())
