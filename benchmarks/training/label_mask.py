"""Train the same EAGLE and EAGLE-3 heads under two rules for which labels count, and measure which accepts more.

    python benchmarks/training/label_mask.py --seed 0 --seed 1 --seed 2 --output label-mask-cpu

label: a label counts if its own token is the assistant's. That is the package's rule (train/loss/distillation.py).
root:  a label counts if the token two places before it is the assistant's: at depth 0 that is its root. So mask the original EAGLE,
       EAGLE-3 and SpecForge. An answer's first two tokens then teach nothing, and the two places after its end do.

All runs of a head train on the same rows, two rules with the same seed: of the weights, the order of the rows and the noise. The
recipe is configs/<head>-quickstart.yaml, shortened. The engine measures acceptance on held-out prompts, chains and greedy choices.
The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch

from headstart.evaluation.results import Report, command_line, decimals, plain
from headstart.train.data import rows
from headstart.train.loss.distillation import Labels, find_labels
from headstart.train.run import loop

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
COLUMNS = {
    "head": ("head", 6, plain),
    "mask": ("mask", 5, plain),
    "seed": ("seed", 4, plain),
    "acceptance_length": ("accepted", 8, decimals(4)),
    "labels": ("labels", 7, plain),
    "cut": ("cut", 5, decimals(2)),
}


def find_labels_by_root(input_ids, document_ids, supervised, num_depths):
    """As find_labels, but a label counts if the token two places before it is supervised.

    The text need not hold the label: after a document's last token the target's distribution is known and teaches.
    """
    before = torch.full_like(document_ids, -2)
    before[:, 1:] = document_ids[:, :-1]  # the document of the position whose feature predicts the label
    counts = torch.zeros_like(supervised)
    counts[:, 2:] = supervised[:, :-2]
    valid = []
    for k in range(num_depths):
        same = torch.zeros_like(supervised)
        same[:, 2 + k :] = before[:, 2 + k :] == document_ids[:, : -(2 + k)]
        valid.append((same & counts & (before >= 0)).flatten())
    valid = torch.stack(valid)
    positions = valid[0].nonzero()[:, 0]
    return Labels(positions, input_ids.flatten()[positions], valid[:, positions])


MASKS = {"label": find_labels, "root": find_labels_by_root}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", action="append", choices=("eagle", "eagle3"), help="may be given again; default both")
    parser.add_argument("--seed", action="append", type=int, help="may be given again; default 0, 1, 2")
    parser.add_argument("--steps", type=int, default=150, help="optimiser steps (default 150)")
    parser.add_argument("--batch-rows", type=int, default=8, help="rows of an optimiser step (default 8)")
    parser.add_argument("--max-tokens", type=int, default=150000, help="tokens of the data (default 150000)")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts (default 32)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt (default 64)")
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    options = parser.parse_args(arguments)
    command = command_line("benchmarks/training/label_mask.py", arguments)
    report = Report("label-mask", COLUMNS, torch.device("cpu"), command, vars(options), options.output)
    heads = options.head or ["eagle", "eagle3"]
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seed or [0, 1, 2]:
            for head in heads:
                for mask in MASKS:
                    report.add({"head": head, "mask": mask, "seed": seed} | train(head, mask, seed, options, folder))
    for head in heads:
        compare(report, head)
    report.finish()
    return 0


def train(head, mask, seed, options, folder):
    """Train one head. Returns what the engine accepts, labels per step, and how often max_grad_norm cut the gradient."""
    output = Path(folder, f"{head}-{mask}-{seed}")
    recipe = {
        "config": CONFIGS / f"{head}-quickstart.yaml",
        "output": output,
        "feature_cache": Path(folder, f"features-{head}"),
        "seed": seed,
        "max_steps": options.steps,
        "max_tokens": options.max_tokens,
        "batch_rows": options.batch_rows,
        "eval_every": 0,
        "eval_prompts": options.prompts,
        "eval_tokens": options.tokens,
        "checkpoint_every": 0,
        "log_every": 1,
        "autocast": "no",
        "tracker": "none",
    }
    argv = [str(word) for name, value in recipe.items() for word in (f"--{name}", value)]
    script, found = import_module(f"headstart.train.{head}"), {}
    choose, build = rows.choose_documents, rows.build_rows

    def choose_same(tokenizer, conversations, row_length, max_tokens, seed, **encoding):
        return choose(tokenizer, conversations, row_length, max_tokens, 0, **encoding)

    def build_same(documents, row_length, *arguments, **named):
        # Under both rules every document has a label, so the rows are the same.
        documents = [(ids, supervised) for ids, supervised in documents if any(supervised[: row_length - 2])]
        found["packed"], found["counts"] = build(documents, row_length, *arguments, **named)
        return found["packed"], found["counts"]

    with ExitStack() as stack:
        patches = [(rows, "find_labels", MASKS[mask]), (loop, "find_labels", MASKS[mask])]
        for place, name, value in [
            *patches,
            (rows, "choose_documents", choose_same),
            (script, "build_rows", build_same),
        ]:
            stack.enter_context(mock.patch.object(place, name, value))
        status = script.main(argv)
    if status:
        raise SystemExit(status)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    norms = [line["grad_norm"] for line in lines if line["kind"] == "train"]
    (measured,) = [line for line in lines if line["kind"] == "acceptance"]
    packed, num_labels = found["packed"], int(found["counts"].sum())
    share = num_labels / int((packed.document_ids >= 0).sum())
    return {
        "acceptance_length": measured["acceptance_length"],
        "verify_steps": measured["num_steps"],
        "labels": num_labels,
        "rows": len(packed.input_ids),
        "share": share,
        "median_norm": statistics.median(norms),
        "cut": sum(norm > 0.5 for norm in norms) / len(norms),
        "cut_if_averaged_over_all": sum(norm * share > 0.5 for norm in norms) / len(norms),
    }


def compare(report, head):
    """Add mean and spread over the seeds, of each mask and of the pairs' differences, to the facts."""
    found = {
        mask: [row["acceptance_length"] for row in report.rows if (row["head"], row["mask"]) == (head, mask)]
        for mask in MASKS
    }
    pairs = {"difference": [other - own for own, other in zip(found["label"], found["root"])]}
    for name, values in (found | pairs).items():
        mean, spread = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        kind = "root less label" if name == "difference" else name
        facts = {f"{head}_{name}_mean": round(mean, 4), f"{head}_{name}_deviation": round(spread, 4)}
        report.state(f"{head} {kind}: {mean:.4f}, standard deviation {spread:.4f} over {len(values)} seeds", **facts)


if __name__ == "__main__":
    sys.exit(main())
