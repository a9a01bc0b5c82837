"""Compute, without sampling, how often each depth's draft is accepted when target and head sample: sum of min(p, q), per depth.

    python benchmarks/training/acceptance_rates.py --head kl=runs/a --head lk=runs/b --output found.json

On the text of held-out answers, teacher-forced, at temperature 1: the mean over labels of the expected acceptance of rejection
sampling. An engine's count of accepted drafts has sampling noise at every token, which hides differences of a percent; here the
heads are compared on the same labels, without that noise. Every head is compared with the first: the difference of the means with
the middle 95 % of a bootstrap over conversations. The last line is JSON.
"""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from headstart.evaluation.results import Report, command_line
from headstart.heads.checkpoint import check_head_fits, load_head
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.loss.distillation import find_labels
from headstart.train.teacher.features import FrozenTarget, load_target

TARGET = Path(__file__).resolve().parents[2] / "assets" / "stdlib-coder"
RESAMPLES = 2000


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", action="append", required=True, metavar="NAME=HEAD", help="may be given again")
    parser.add_argument("--target", default=str(TARGET), help="with a heldout.jsonl in it (default: the embedded one)")
    parser.add_argument(
        "--depths", type=int, default=4, help="number of depths (default 4; fewer if the head has fewer)"
    )
    parser.add_argument("--conversations", type=int, help="number of held-out conversations (default: all)")
    parser.add_argument(
        "--length", type=int, default=1024, help="greatest number of tokens of a conversation (default 1024)"
    )
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_target(options.target, device, "float32")
    target = FrozenTarget(model)
    held_out = load_conversations(str(Path(options.target, "heldout.jsonl")))[: options.conversations]
    encoded = encode_conversations(tokenizer, held_out)
    command = command_line("benchmarks/training/acceptance_rates.py", arguments)
    report = Report("acceptance-rates", {}, device, command, vars(options), options.output)
    rows, first = [], None
    for name, path in (one.split("=", 1) for one in options.head):
        head = load_head(path, "float32")
        check_head_fits(head, model.config)
        found = measure(target, take_embedding(head, target).to(device).eval(), encoded, name, options)
        first = found if first is None else first
        for k, (sums, reference) in enumerate(zip(found.unbind(1), first.unbind(1))):
            row = {"head": name, "depth": k + 1, "labels": int(sums[:, 1].sum()), "accepted": mean(sums).item()}
            row |= dict(zip(("difference", "low", "high"), compare(sums, reference)))
            rows.append(row)
            print(
                f"{name:20} depth {k + 1}  {row['accepted']:.4f} accepted of {row['labels']} labels; than the first head "
                f"{row['difference']:+.4f}, 95 % {row['low']:+.4f} to {row['high']:+.4f}",
                flush=True,
            )
    report.rows = rows
    report.finish()
    return 0


def take_embedding(head, target):
    if getattr(head, "needs_embedding", False):
        head.take_embedding(target.embedding.detach().float().cpu())
    return head


@torch.no_grad()
def measure(target, head, encoded, name, options):
    """fp64 [conversations, depths, 2]: the sum over a conversation's labels of sum min(p, q), and the number of its labels."""
    depths, device = min(options.depths, head.num_speculative_tokens), target.lm_head.weight.device
    totals = torch.zeros(len(encoded), depths, 2, dtype=torch.float64)
    for place, (ids, supervised) in enumerate(tqdm(encoded, desc=name, unit=" conversations")):
        input_ids = torch.tensor([ids[: options.length]], device=device)
        supervised = torch.tensor([supervised[: options.length]], device=device)
        documents, positions = torch.zeros_like(input_ids), torch.arange(input_ids.shape[1], device=device)[None]
        features = target.features(input_ids, positions, documents, head.aux_layers)
        last = features[0, :, : target.hidden_size]
        labels = find_labels(input_ids, documents, supervised, depths)
        if not len(labels.positions):
            continue
        p = target.lm_head(last[labels.positions - 1]).softmax(-1)  # [N, V]
        read = features[..., target.hidden_size :] if head.aux_layers else features
        drafted = head.predict(read, input_ids, positions, documents, target.lm_head.weight, depths)
        p = p if drafted.draft_ids is None else p[:, drafted.draft_ids]
        for k in range(depths):
            roots = (labels.positions - 2 - k).clamp_min(0)
            q = drafted.logits(drafted.states[k][roots], k).softmax(-1)
            accepted = torch.minimum(p, q).sum(-1)[labels.valid[k]]
            totals[place, k] = torch.tensor([accepted.double().sum(), len(accepted)])
    return totals


def mean(sums):
    """[..., conversations, 2] -> [...]"""
    return sums[..., 0].sum(-1) / sums[..., 1].sum(-1)


def compare(sums, reference):
    """(difference of the means, low, high): its middle 95 % over resampled conversations, the same for both."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(sums), (RESAMPLES, len(sums)), generator=generator)
    differences = (mean(sums[drawn]) - mean(reference[drawn])).sort().values
    ends = differences[int(0.025 * RESAMPLES)].item(), differences[int(0.975 * RESAMPLES)].item()
    return (mean(sums) - mean(reference)).item(), *ends


if __name__ == "__main__":
    sys.exit(main())
