"""One process, two and four are the same training: as a user launches them, over gloo on the CPU. (GPUs: test_many_gpus.py.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headstart.tests.train.tiny_runs import approximately, head_tensors
from headstart.train import medusa
from headstart.train.run.checkpointing import read_state

ROOT = Path(medusa.__file__).parents[1]
SEVERAL = Path(__file__).with_name("several_runs.py")
EIGHT_ROWS = [
    {"batch_rows": 8, "accumulate": 1},
    {"batch_rows": 2, "accumulate": 2},
    {"batch_rows": 1, "accumulate": 2},
]
ONE, TWO, FOUR = EIGHT_ROWS  # the same rows per optimiser step on 1, 2 and 4 processes


def launch(config, num_processes, port, script, *argv):
    """What `accelerate launch` says on stderr; the configurations are the ones for GPUs, kept on the CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
    command += ["--config_file", str(ROOT / "configs" / "accelerate" / config), "--main_process_port", str(port)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, str(script), *argv], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def assert_same_training(one, other, metrics, since=0, rtol=1e-4, atol=2e-5):
    """Loss curves whose residual is rounding and has no drift, and heads that are close.  one, other: run folders"""
    curves = [[line for line in metrics(run=folder.name) if line["step"] > since] for folder in (one, other)]
    assert [line["step"] for line in curves[0]] == [line["step"] for line in curves[1]] != []
    for a, b in zip(*curves, strict=True):
        assert b == approximately(a, 1e-5)
    residuals = [a["loss"] / b["loss"] - 1 for a, b in zip(*curves)]
    assert abs(sum(residuals) / len(residuals)) < 3e-7
    torch.testing.assert_close(head_tensors(other), head_tensors(one), rtol=rtol, atol=atol)


@pytest.mark.slow
def test_four_processes_train_as_one(trainers, read_metrics, tmp_path, free_port):
    """Medusa's stages under ddp.yaml: gradients summed and moments divided over four ranks, and the engine's acceptance."""
    measured = {"eval_prompts": 3, "eval_tokens": 8, "checkpoint_every": 3}
    own = {"medusa": measured | {"cache_features": True, "loss": "lk"}, "joint": measured | {"max_steps": 5}}
    packed = {"packed_data": tmp_path / "packed"}  # by one of the four, and by none of them for the second run
    runs = []
    for name, keys in own.items():
        trainers[name].run(**ONE, **keys, output=tmp_path / f"{name}-1")
        runs.append(["medusa", trainers[name].arguments(**FOUR, **keys, **packed, output=tmp_path / f"{name}-4")])
    launch("ddp.yaml", 4, free_port(), SEVERAL, json.dumps(runs))
    for name, keys in own.items():
        # Adam turns the adapter's first gradients, however small, into steps of one size.
        close = {"rtol": 1e-3, "atol": 1e-4} if name == "joint" else {}
        assert_same_training(tmp_path / f"{name}-1", tmp_path / f"{name}-4", read_metrics, **close)
        (one,), (four,) = (read_metrics("acceptance", run=f"{name}-{count}") for count in (1, 4))
        assert four.pop("per_position") == pytest.approx(one.pop("per_position"))
        assert four == {k: pytest.approx(v, rel=1e-5) if isinstance(v, float) else v for k, v in one.items()}
        # The moments that four ranks held are whole in the checkpoint: one process goes on, at its own pace.
        checkpoint = tmp_path / f"{name}-4" / "checkpoints" / "step-000003"
        assert read_state(checkpoint)["rows_per_step"] == 8
        trainers[name].run(**ONE, **keys, output=tmp_path / f"{name}-on", resume_from=checkpoint)
        assert_same_training(tmp_path / f"{name}-1", tmp_path / f"{name}-on", read_metrics, since=3, **close)


@pytest.mark.slow
def test_two_processes_with_a_divided_target_train_as_one(trainers, read_metrics, tmp_path, free_port):
    """Every trainer under fsdp2.yaml; of the cache's last round only one rank has rows; a run of one process goes on in two."""
    own = {
        "eagle": {"cache_features": True, "checkpoint_every": 3},
        "eagle3": {"eval_prompts": 4, "eval_tokens": 8, "loss": "lk"},
        "block": {"loss": "lk"},
        "mlp_speculator": {},
        "medusa": {"checkpoint_every": 3},
    }
    runs = []
    for name, keys in own.items():
        trainers[name].run(**ONE, **keys, output=tmp_path / f"{name}-1")
        going_on = {"resume_from": tmp_path / "medusa-1" / "checkpoints" / "step-000003"} if name == "medusa" else {}
        runs.append([name, trainers[name].arguments(**TWO, **keys, **going_on, output=tmp_path / f"{name}-2")])
    left_out = {"lr": 1e38, "warmup_ratio": 0, "max_grad_norm": 0, "max_steps": 3, "max_skipped_steps": 2}
    runs.append(["medusa", trainers["medusa"].arguments(**TWO, **left_out, output=tmp_path / "left-out")])
    said = launch("fsdp2.yaml", 2, free_port(), SEVERAL, json.dumps(runs))
    assert "teacher-forced" not in said
    assert "changed since the run was started: " in said
    for name in own:
        since = 3 if name == "medusa" else 0
        assert_same_training(tmp_path / f"{name}-1", tmp_path / f"{name}-2", read_metrics, since)
    # What both ranks were fed in steps that are left out; a row is text of one of them.
    entries = [json.loads(line) for line in (tmp_path / "left-out" / "non-finite-steps.jsonl").open()]
    assert [entry["step"] for entry in entries] == [2, 3]
    for entry in entries:
        fed = [row for rank in entry["ranks"] for micro_step in rank for row in micro_step["rows"]]
        assert len(entry["ranks"]) == 2
        assert len(set(fed)) == 8
    # Acceptance: the engine's, which two ranks divide in another way, with the head's weights in the target's dtype.
    (one,), (two,) = (read_metrics("acceptance", run=f"eagle3-{count}") for count in (1, 2))
    assert two.pop("per_position") == pytest.approx(one.pop("per_position"))
    assert two == {k: pytest.approx(v, rel=1e-5) if isinstance(v, float) else v for k, v in one.items()}
    assert two["source"] == "engine"
    # And back: what two ranks saved goes on in one process without a divided target.
    keys = own["eagle"] | {"resume_from": tmp_path / "eagle-2" / "checkpoints" / "step-000003"}
    trainers["eagle"].run(**ONE, **keys, output=tmp_path / "eagle-on")
    assert_same_training(tmp_path / "eagle-1", tmp_path / "eagle-on", read_metrics, since=3)
