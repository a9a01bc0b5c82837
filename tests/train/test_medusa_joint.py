"""Runs of stage joint of train/medusa.py (Medusa-2): heads and a LoRA adapter of the target, trained together.

The loss and the adapter: loss/test_joint.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.inference.llm import LLM
from headstart.inference.models.adapter import read_adapter
from headstart.inference.sampling_params import SamplingParams
from headstart.tests.train.conftest import all_lines, assert_rates_are_those_of_their_step
from headstart.train import medusa
from headstart.train.run import loop
from headstart.train.run.checkpointing import list_checkpoints
from headstart.train.teacher import sharded_target

STEPS = {"max_steps": 7, "checkpoint_every": 2, "eval_every": 3, "eval_prompts": 3, "eval_tokens": 8}
JOINT = {"stage": "joint", "target_lr": 0.005, "lora_rank": 4, "lora_alpha": 8}


@pytest.fixture
def start(tmp_path):
    """Heads to start from, of the shape of `arguments`."""
    torch.manual_seed(5)
    head = Medusa(MedusaConfig(32, 48, 3))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_head(head, tmp_path / "start")
    return tmp_path / "start"


@pytest.fixture
def joint(arguments, start):
    """joint(**keys) -> status of a run of stage joint."""
    return lambda **keys: medusa.main(arguments(**(JOINT | {"start_from": start} | keys)))


def weights_of(folder):
    """Every tensor of a head's folder and of the adapter in it."""
    files = (folder / "medusa_lm_head.safetensors", folder / "adapter" / "adapter_model.safetensors")
    return {f"{path.name} {name}": tensor for path in files for name, tensor in load_file(path).items()}


def assert_same_run(one, other):
    assert all_lines(one) == all_lines(other)
    weights = [weights_of(folder / "head") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    states = [torch.load(list_checkpoints(folder)[-1] / "optimizer.pt", weights_only=True) for folder in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for index, entry in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][index][name]) for name, value in entry.items())


@pytest.mark.parametrize(
    ("step", "keys"), [(3, {"lora_dropout": 0.3, "accumulate": 2}), (5, {"target_dtype": "bfloat16", "loss": "lk"})]
)
def test_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(joint, start, tmp_path, monkeypatch, step, keys):
    """Stopped where a measurement is due (3), and where nothing is (5)."""
    keys = STEPS | keys
    assert joint(**keys) == 0
    calls, finish_step = [], loop.finish_step

    def finish_and_signal(*given, **named):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return finish_step(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish_step", finish_and_signal)
        assert joint(**keys, output=tmp_path / "stopped") == 128 + signal.SIGTERM
    assert list_checkpoints(tmp_path / "stopped")[-1].name == f"step-{step:06d}"
    (start / "medusa_lm_head.safetensors").unlink()  # what it started from is no longer needed
    assert joint(**keys, output=tmp_path / "stopped", resume=True) == 0
    assert_same_run(tmp_path / "run", tmp_path / "stopped")
    if keys.get("loss") == "lk":
        assert_rates_are_those_of_their_step(tmp_path / "stopped")


def test_measuring_leaves_the_training_as_it_is(joint, tmp_path, read_metrics):
    joint(max_steps=5, eval_every=1, eval_prompts=3, eval_tokens=8, output=tmp_path / "measured")
    joint(max_steps=5, eval_every=0, eval_prompts=3, eval_tokens=8)
    assert read_metrics() == read_metrics(run="measured")
    one, other = (weights_of(tmp_path / name / "head") for name in ("run", "measured"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(read_metrics("acceptance", "measured")) == 5


def test_two_processes_train_as_one(joint, arguments, start, read_metrics, tmp_path):
    keys = {"max_steps": 3, "accumulate": 2, "checkpoint_every": 2, "eval_prompts": 3, "eval_tokens": 8}
    joint(**keys, batch_rows=4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = arguments(**JOINT, **keys, batch_rows=2, start_from=start, output=tmp_path / "two")
    processes = [
        subprocess.Popen(
            [sys.executable, medusa.__file__, *words],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outcomes = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outcomes
    for a, b in zip(read_metrics(), read_metrics(run="two"), strict=True):
        assert a.pop("kind") == b.pop("kind") == "train"
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    one, two = (weights_of(tmp_path / name / "head") for name in ("run", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4, msg=name)
    # What two processes have saved, one goes on with.
    saved = tmp_path / "two" / "checkpoints" / "step-000002"
    assert (
        medusa.main(
            arguments(**JOINT, **keys, batch_rows=4, start_from=start, resume_from=saved, output=tmp_path / "on")
        )
        == 0
    )
    (last,), (expected,) = ([line for line in read_metrics(run=name) if line["step"] == 3] for name in ("on", "two"))
    assert last.pop("kind") == expected.pop("kind") == "train"
    assert last == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_run_learns_and_says_what_became_of_the_target(joint, counting_target, tmp_path, read_metrics):
    """On a target that counts: the loss falls, and the adapted target's own loss stays near the frozen one's."""
    keys = {"target": counting_target, "max_steps": 40, "eval_prompts": 4, "eval_tokens": 8, "batch_rows": 4}
    joint(**keys, shared_lm_head=False, lr=0.02)
    lines = read_metrics()
    assert sum(line["loss"] for line in lines[-5:]) < 0.7 * sum(line["loss"] for line in lines[:5])
    assert lines[0]["target_loss"] == pytest.approx(0, abs=1e-6)  # the adapter starts as the identity
    assert lines[5]["target_loss"] > 1e-6
    (measured,) = read_metrics("acceptance")
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert saved["heldout_loss"] == measured["heldout_loss"] != measured["frozen_heldout_loss"]
    assert saved["heldout_tokens"] > 10
    assert measured["heldout_loss"] < 1.1 * measured["frozen_heldout_loss"] + 0.1
    assert measured["source"] == "engine"


@pytest.mark.parametrize(
    "key", ["target_lr", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "medusa_weight"]
)
def test_key_changes_the_run(joint, tmp_path, read_metrics, key):
    values = {
        "target_lr": 0.01,
        "lora_rank": 2,
        "lora_alpha": 3,
        "lora_dropout": 0.4,
        "lora_targets": "q_proj",
        "medusa_weight": 0.5,
    }
    joint(max_steps=3)
    joint(max_steps=3, output=tmp_path / "other", **{key: values[key]})
    assert read_metrics()[-1] != read_metrics(run="other")[-1]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"start_from": ""}, "start_from"),
        ({"cache_features": True}, "set cache_features to false"),
        ({"lr": 0}, "lr and lora_alpha above 0"),
        ({"num_heads": 2}, "has num_heads 3, this run asks for 2"),
        ({"target_loss": "lk"}, "target_loss must be one of kl, hard"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run_folder_exists(joint, tmp_path, keys, said):
    with pytest.raises(ValueError, match=said):
        joint(**keys)
    assert not (tmp_path / "run").exists()


def test_divided_target_is_refused_before_it_is_loaded(joint, tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_target, "wants_sharded_target", lambda: True)
    monkeypatch.setattr(medusa, "load_target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=r"stage joint needs the whole target in every process: .*ddp\.yaml"):
        joint()
    assert not (tmp_path / "run").exists()


def test_heads_trained_with_an_adapter_are_no_start(joint, tmp_path):
    joint(max_steps=1)
    with pytest.raises(ValueError, match="was trained with an adapter already"):
        joint(max_steps=1, start_from=tmp_path / "run", output=tmp_path / "again")


def test_peft_reads_the_adapter_and_the_engine_decodes_as_the_meter_did(joint, word_target, tmp_path):
    """The final measurement's own samples come back from an engine that loads head and adapter from the run's files."""
    joint(max_steps=6, eval_prompts=4, eval_tokens=8, lr=0.05, target_lr=0.05, target_dtype="float32")
    run = tmp_path / "run"
    adapter = read_adapter(run)
    assert load_head(run).config.adapter == adapter.fingerprint
    frozen = AutoModelForCausalLM.from_pretrained(word_target)
    weights = {name: p.clone() for name, p in frozen.named_parameters()}
    merged = PeftModel.from_pretrained(frozen, run / "head" / "adapter").merge_and_unload()
    for name, weight in merged.named_parameters():
        assert torch.equal(weight, adapter.add_to(name, weights[name], 0))
    assert sum(not torch.equal(weight, weights[name]) for name, weight in merged.named_parameters()) == 14
    saved = json.loads((run / "acceptance.json").read_text())
    llm = LLM(word_target, adapter=run, dtype="float32", speculative_config={"model": run})
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.generate([sample["prompt"] for sample in saved["samples"]], params)
    assert [output.outputs[0].text for output in outputs] == [sample["output"] for sample in saved["samples"]]
