"""Does it pay to run the target's next forward beside the head's backward?  Times training micro-steps with and without, in turn.

    python benchmarks/training/lookahead.py                                        an 8B shape of 32 layers, Medusa heads,
    row_length 2048 python benchmarks/training/lookahead.py --layers 8 --hidden 1024 --rows 2      a small target, whose launches
    the GPU waits for

The target is random, and so are the rows. A micro-step is what train/medusa.py does between two optimiser steps. Groups of
micro-steps with and without alternate. Prints milliseconds per micro-step of a group (p20, p50, p80 over the groups); the last line
is JSON. Needs a GPU: on a CPU, where nothing is made ahead, it only shows that it runs.
"""

import argparse
import json
import statistics
import sys
import time
from datetime import date

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.evaluation.compare import hardware_name
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.data import lookahead
from headstart.train.loss.distillation import Objective, accumulate_gradients, find_labels
from headstart.train.loss.losses import Loss
from headstart.train.loss.predictions import medusa_predictions
from headstart.train.teacher.features import FrozenTarget


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-length", type=int, default=2048)
    parser.add_argument("--micro-steps", type=int, default=10, help="per group")
    parser.add_argument("--groups", type=int, default=6, help="of each kind, after one that is not counted")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = build_micro_step(options, device)
    times = {True: [], False: []}
    if options.groups < 2:
        parser.error(f"--groups must be at least 2, got {options.groups}")
    for group in range(2 * options.groups + 2):
        lookahead.AHEAD = group % 2 == 0
        seconds = step(options.micro_steps)
        if group >= 2:
            times[lookahead.AHEAD].append(seconds)
    figures = {"date": date.today().isoformat(), "hardware": hardware_name(device), "torch": torch.__version__}
    figures |= vars(options)
    for ahead, name in ((False, "one stream"), (True, "ahead")):
        p20, p50, p80 = (1e3 * statistics.quantiles(times[ahead], n=10)[i] for i in (1, 4, 7))
        print(f"{name:12} {p20:9.2f} {p50:9.2f} {p80:9.2f} ms")
        figures[name] = {"p20": p20, "p50": p50, "p80": p80}
    print(json.dumps(figures))
    return 0


def build_micro_step(options, device):
    """run(count) -> seconds per micro-step of `count`, until the GPU is done with all."""
    heads = max(options.hidden // 128, 1)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=options.vocab,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    target = FrozenTarget(model)
    head = Medusa(MedusaConfig(options.hidden, options.vocab, num_heads=4, shared_lm_head=True)).to(device)
    objective = Objective(Loss("kl", 10.0), [0.8**k for k in range(4)])
    shape = options.rows, options.row_length
    ids = torch.randint(options.vocab, shape)
    positions = torch.arange(options.row_length).expand(shape) % 300
    documents = torch.arange(options.row_length).expand(shape) // 300

    def make(index):
        batch = [part[index].to(device) for part in (ids, positions, documents)]
        return *batch, target.features(*batch)

    def run(count):
        order = (np.roll(np.arange(options.rows), i) for i in range(count))
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        wait()
        begun = time.perf_counter()
        for _, *batch, features in lookahead.look_ahead(make, order, device):
            labels = find_labels(batch[0], batch[2], torch.ones_like(batch[0], dtype=torch.bool), 4)
            with torch.autocast(device.type, torch.bfloat16):
                predictions = medusa_predictions(head, features, target.lm_head.weight)
                projection = target.lm_head, objective, options.rows * options.row_length, 2048
                accumulate_gradients(predictions, features.flatten(0, 1), labels, *projection, False)
        wait()
        return (time.perf_counter() - begun) / count

    return run


if __name__ == "__main__":
    sys.exit(main())
