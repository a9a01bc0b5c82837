"""Runs of the training scripts on a tiny target: how a test starts, interrupts, reads and compares them."""

import json
import os
import signal
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.checkpoint import save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.tests.train.trainings import START
from headstart.train.run import loop
from headstart.train.run.checkpointing import list_checkpoints, read_state

# The layer of a published head: no sizes of the tiny target's layers but those that it must have.
SHAPE = {"hidden_size": 32, "vocab_size": 48, "intermediate_size": 40, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_theta": 500.0, "attention_bias": True}
START_VOCABULARY = 24  # every second token
LAYERS = {
    "block": (
        BlockHead,
        partial(
            BlockConfig,
            num_hidden_layers=2,
            aux_layer_ids=(0, 1),
            mask_token_id=9,
            num_speculative_tokens=3,
            edge_rank=4,
        ),
    ),
    "eagle": (Eagle, partial(EagleConfig, fc_bias=True)),
    "eagle3": (
        Eagle3,
        partial(
            Eagle3Config,
            target_hidden_size=32,
            draft_vocab_size=START_VOCABULARY,
            aux_layer_ids=(0, 2),
        ),
    ),
}


class Trainer:
    """A training script, and where its runs take a fraction of a second: on a tiny target, beneath `folder`."""

    def __init__(self, training, *, target, data, folder, start):
        """training: TinyTraining; start(family) -> a folder of heads that second stages start from."""
        self.training, self.folder, self.start = training, Path(folder), start
        self.script = training.script
        self.given = {"target": target, "data": data}

    def arguments(self, **keys):
        """The command line of a run in folder/"run", unless the keys say otherwise."""
        values = self.given | {"output": self.folder / "run", "row_length": 64, "max_steps": 6, "batch_rows": 2}
        values |= {"log_every": 1, "eval_prompts": 0, "tracker": "none", "autocast": "no", "checkpoint_every": 0}
        values |= {"lr": 0.01} | self.training.recipe | keys
        if values.get("start_from") is START:
            values["start_from"] = self.start(self.training.family)
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]

    def main(self, **keys):
        """The script's status."""
        return self.script.main(self.arguments(**keys))

    def run(self, **keys):
        """The folder of a run that ends well."""
        words = self.arguments(**keys)
        assert self.script.main(words) == 0
        return Path(words[words.index("--output") + 1])


def save_start(folder, family, **config):
    """Heads of the shape that the tiny trainings have, with weights that all do something."""
    torch.manual_seed(5)
    if family == "medusa":
        head = Medusa(MedusaConfig(32, 48, 3, **config))
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    elif family in LAYERS:
        kind, head_config = LAYERS[family]
        shape = SHAPE | ({"attention_bias": False} if family == "block" else {})
        head = kind(head_config(**shape | config))
        if not head.embed_tokens.weight.requires_grad:
            head.embed_tokens = None  # as in published files
        if family == "block" and head.config.edge_rank:
            torch.nn.init.normal_(head.markov_head.markov_w2.weight, std=0.2)
        if family == "eagle3":
            head.set_draft_vocabulary(torch.arange(START_VOCABULARY), torch.arange(48) % 2 == 0)
    else:
        head = MLPSpeculator(MLPSpeculatorConfig(32, 48, 24, 3, **config))
        for norm in head.ln:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            torch.nn.init.normal_(norm.bias, std=0.3)
    save_head(head, folder)
    return folder


# ---- what a run leaves ----


def all_lines(folder, kind=None):
    """A run's metrics.jsonl, or its lines of one kind, without what the clock and the memory decide."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
        line.pop("peak_memory_gib", None)
    return [line for line in lines if kind in (None, line["kind"])]


def head_tensors(folder):
    """{name: tensor} of the head that a run has written, and of the adapter in it."""
    files = sorted((folder / "head").rglob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def newest_step(folder):
    """The step of the newest checkpoint."""
    return int(list_checkpoints(folder)[-1].name.removeprefix("step-"))


def optimizer_state(folder):
    """What the newest checkpoint keeps of the optimiser."""
    return torch.load(list_checkpoints(folder)[-1] / "optimizer.pt", weights_only=True)


def assert_same_tensors(one, other):
    """Equal names and equal bits."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_run(one, other):
    """Equal in every figure and in every bit of the head and of the optimiser."""
    assert all_lines(one) == all_lines(other)
    assert_same_tensors(head_tensors(one), head_tensors(other))
    states = [optimizer_state(folder) for folder in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys() != set()
    for index, moments in states[0]["state"].items():
        assert_same_tensors(moments, states[1]["state"][index])


def assert_rates_are_those_of_their_step(folder):
    """What a checkpoint says of the rates of acceptance that lk follows is what the metrics of its step say of every depth."""
    alphas = {line["step"]: line for line in all_lines(folder, "train")}
    for checkpoint in list_checkpoints(folder):
        state = read_state(checkpoint)
        line = alphas[state["step"]]
        expected = [line[f"head{k}_alpha"] for k in range(len(state["rates"]))]
        assert state["rates"] == pytest.approx(expected, rel=1e-9)
        assert f"head{len(expected)}_alpha" not in line
        assert len(set(expected)) == len(expected)


def approximately(line, rel, abs=1e-6):
    """A line of metrics.jsonl whose numbers may differ by rounding."""
    return {
        key: pytest.approx(value, rel=rel, abs=abs) if type(value) is float else value for key, value in line.items()
    }


# ---- what happens to a run on its way ----


class Killed(BaseException):
    """What ends a run in the middle of a step, and which nobody catches."""


def die(*_):
    raise Killed


def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def settle():
    """Wait until the checkpoint that is being written is whole."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint writer":
            thread.join()


@contextmanager
def in_every_step(act):
    """Within the block every optimiser step first calls act(number, trained): its number, from 1, and the module that is trained.

    Its gradients are there then, and no weight has moved.
    """
    numbers, finish_step = iter(range(1, 1000)), loop.finish_step

    def act_and_finish(trained, *rest, **named):
        act(next(numbers), trained)
        return finish_step(trained, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "finish_step", act_and_finish)
        yield


def in_step(number, act):
    """Within the block act(trained) is called in the optimiser step of that number alone."""
    return in_every_step(lambda step, trained: step == number and act(trained))
