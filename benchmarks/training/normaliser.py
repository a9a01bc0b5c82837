"""EAGLE-3's loss over a draft vocabulary, ours against the original's: what the difference is worth in acceptance.

    python benchmarks/training/normaliser.py --output runs/normaliser -- --max_steps 1600 --batch_rows 16 --row_length 512
    --max_tokens 0 python benchmarks/training/normaliser.py --output runs/small --conversations 12 -- --max_steps 10

The target's law over the draft vocabulary: ours keeps the normaliser of the whole vocabulary, so that a position whose tokens are
mostly outside counts little; the original (SafeAILab/EAGLE, traineagle3) divides by the sum over the draft vocabulary, and leaves
out positions whose likeliest token is outside. (It also averages over positions that are not supervised, as zeros: a factor, which
is not imitated.) What follows `--` are keys of train/eagle3.py, over those of configs/eagle3-quickstart.yaml. Both heads start from
the same seed; then benchmarks/training/acceptance_rates.py compares them. A complete run is kept and used again.
"""

import argparse
import sys
from pathlib import Path

import acceptance_rates
import torch

from headstart.train import eagle3
from headstart.train.loss import distillation

ROOT = Path(__file__).resolve().parents[2]
OURS = distillation.target_law, distillation.distill_loss


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the two runs and of found.json")
    parser.add_argument("--conversations", type=int, help="held-out ones that are measured (default: all)")
    parser.add_argument("keys", nargs="*", help="after --: keys of train/eagle3.py")
    options = parser.parse_args(arguments)
    runs = {name: options.output / name for name in ("ours", "original")}
    for name, run in runs.items():
        functions = OURS if name == "ours" else as_the_original()
        distillation.target_law, distillation.distill_loss = functions
        words = ["--config", ROOT / "configs" / "eagle3-quickstart.yaml", "--target", acceptance_rates.TARGET]
        words += ["--tracker", "none", "--eval_prompts", 0, *options.keys, "--output", run]
        if not (run / "head").is_dir() and eagle3.main([str(word) for word in words]):
            return 1
    distillation.target_law, distillation.distill_loss = OURS
    words = [f"--head={name}={run}" for name, run in runs.items()]
    if options.conversations:
        words.append(f"--conversations={options.conversations}")
    return acceptance_rates.main([*words, f"--output={options.output / 'found.json'}"])


def as_the_original():
    """(target_law, distill_loss) that stand for ours in train/loss/distillation.py."""
    target_law, distill_loss = OURS
    inside = None

    def law(logits, draft_ids, top_k=0):
        nonlocal inside
        drafted = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        drafted[draft_ids] = True
        inside = drafted[logits.argmax(-1)]
        return target_law(logits[:, draft_ids].contiguous(), None, top_k)

    def loss(logits, labels, valid, law, *others):
        return distill_loss(logits, labels, valid & inside, law, *others)

    return law, loss


if __name__ == "__main__":
    sys.exit(main())
