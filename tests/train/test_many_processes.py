"""One process, two and four are the same training: as a user launches them, over gloo on the CPU. (GPUs: test_many_gpus.py.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart.train import eagle, eagle3, medusa, mlp_speculator
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


def assert_same_training(one, other, metrics, since=0):
    """Loss curves whose residual is rounding and has no drift, and heads that are close.  one, other: run folders"""
    curves = [[line for line in metrics(run=folder.name) if line["step"] > since] for folder in (one, other)]
    assert [line["step"] for line in curves[0]] == [line["step"] for line in curves[1]] != []
    for a, b in zip(*curves, strict=True):
        assert b == {k: pytest.approx(v, rel=1e-5, abs=1e-6) if isinstance(v, float) else v for k, v in a.items()}
    residuals = [a["loss"] / b["loss"] - 1 for a, b in zip(*curves)]
    assert abs(sum(residuals) / len(residuals)) < 3e-7
    for path in (one / "head").glob("*.safetensors"):
        expected, found = load_file(path), load_file(other / "head" / path.name)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.slow
def test_four_processes_train_as_one(arguments, read_metrics, tmp_path, free_port):
    """The script itself under ddp.yaml: gradients summed and moments divided over four ranks, and the engine's acceptance."""
    keys = {"eval_prompts": 3, "eval_tokens": 8, "checkpoint_every": 3, "cache_features": True, "loss": "lk"}
    assert medusa.main(arguments(**ONE, **keys, output=tmp_path / "one")) == 0
    launch(
        "ddp.yaml", 4, free_port(), ROOT / "train" / "medusa.py", *arguments(**FOUR, **keys, output=tmp_path / "four")
    )
    assert_same_training(tmp_path / "one", tmp_path / "four", read_metrics)
    (one,), (four,) = (read_metrics("acceptance", run=name) for name in ("one", "four"))
    assert four.pop("per_position") == pytest.approx(one.pop("per_position"))
    assert four == one | {"acceptance_length": pytest.approx(one["acceptance_length"])}
    # The moments that four ranks held are whole in the checkpoint: one process goes on, at its own pace.
    checkpoint = tmp_path / "four" / "checkpoints" / "step-000003"
    assert read_state(checkpoint)["rows_per_step"] == 8
    assert medusa.main(arguments(**ONE, **keys, output=tmp_path / "on", resume_from=checkpoint)) == 0
    assert_same_training(tmp_path / "one", tmp_path / "on", read_metrics, since=3)


@pytest.mark.slow
def test_two_processes_with_a_divided_target_train_as_one(
    arguments, speculator_arguments, eagle_arguments, eagle3_arguments, read_metrics, tmp_path, free_port
):
    """Every trainer under fsdp2.yaml; of the cache's last round only one rank has rows; a run of one process goes on in two."""
    own = {
        "eagle": (eagle, eagle_arguments, {"cache_features": True, "checkpoint_every": 3}),
        "eagle3": (eagle3, eagle3_arguments, {"eval_prompts": 4, "eval_tokens": 8, "loss": "lk"}),
        "mlp_speculator": (mlp_speculator, speculator_arguments, {}),
        "medusa": (medusa, arguments, {"checkpoint_every": 3}),
    }
    runs = []
    for name, (trainer, build, keys) in own.items():
        assert trainer.main(build(**ONE, **keys, output=tmp_path / f"{name}-1")) == 0
        going_on = {"resume_from": tmp_path / "medusa-1" / "checkpoints" / "step-000003"} if name == "medusa" else {}
        runs.append([name, build(**TWO, **keys, **going_on, output=tmp_path / f"{name}-2")])
    said = launch("fsdp2.yaml", 2, free_port(), SEVERAL, json.dumps(runs))
    assert said.count("the target is sharded over the GPUs") == 1
    assert "changed since the run was started: " in said
    for name in own:
        since = 3 if name == "medusa" else 0
        assert_same_training(tmp_path / f"{name}-1", tmp_path / f"{name}-2", read_metrics, since)
    # Acceptance: teacher-forced on all ranks together instead of the engine's.
    (measured,) = read_metrics("acceptance", run="eagle3-2")
    assert measured["source"] == "teacher_forced"
    assert json.loads((tmp_path / "eagle3-2" / "acceptance.json").read_text())["samples"] == []
    # And back: what two ranks saved goes on in one process without a divided target.
    keys = own["eagle"][2] | {"resume_from": tmp_path / "eagle-2" / "checkpoints" / "step-000003"}
    assert eagle.main(eagle_arguments(**ONE, **keys, output=tmp_path / "eagle-on")) == 0
    assert_same_training(tmp_path / "eagle-1", tmp_path / "eagle-on", read_metrics, since=3)
