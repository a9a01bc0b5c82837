"""Runs that are stopped, killed or gone back in go on from their checkpoints as if nothing had been.

The checkpoints themselves: run/test_checkpointing.py; runs that may not go on: run/test_run_folder.py.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart.tests.train.conftest import all_lines, assert_rates_are_those_of_their_step
from headstart.train import medusa
from headstart.train.run import loop, run_folder
from headstart.train.run.checkpointing import list_checkpoints

STEPS = {
    "max_steps": 9,
    "checkpoint_every": 2,
    "eval_every": 3,
    "eval_prompts": 3,
    "eval_tokens": 8,
    "keep_checkpoints": 9,
}


def run(arguments, **keys):
    assert medusa.main(arguments(**keys)) == 0


def assert_same_run(one, other):
    """Equal in every figure and in every bit of the head and of the optimiser."""
    assert all_lines(one) == all_lines(other)
    heads = [load_file(folder / "head" / "medusa_lm_head.safetensors") for folder in (one, other)]
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    states = [torch.load(list_checkpoints(folder)[-1] / "optimizer.pt", weights_only=True) for folder in (one, other)]
    for index, entry in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][index][name]) for name, value in entry.items())


def stop_after(monkeypatch, step, number=signal.SIGTERM):
    """Send this process `number` while it is in optimiser step `step` (from 1)."""
    calls, finish_step = [], loop.finish_step

    def finish_and_signal(*given, **named):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return finish_step(*given, **named)

    monkeypatch.setattr(loop, "finish_step", finish_and_signal)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("step", "loss"), [(2, "kl"), (3, "lk"), (5, "kl")])
def test_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(arguments, tmp_path, monkeypatch, cached, step, loss):
    """Stopped where a checkpoint is due (2), where a measurement is due (3), and where neither is (5)."""
    keys = STEPS | {"cache_features": cached, "accumulate": 2, "loss": loss}
    run(arguments, **keys)
    stop_after(monkeypatch, step)
    assert medusa.main(arguments(**keys, output=tmp_path / "stopped")) == 128 + signal.SIGTERM
    assert list_checkpoints(tmp_path / "stopped")[-1].name == f"step-{step:06d}"
    assert not (tmp_path / "stopped" / "head").exists()
    monkeypatch.undo()
    run(arguments, **keys, output=tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "stopped")
    assert [line["step"] for line in all_lines(tmp_path / "stopped") if line["kind"] == "acceptance"] == [3, 6, 9]
    if loss == "lk":
        assert_rates_are_those_of_their_step(tmp_path / "stopped")


@pytest.mark.parametrize("place", ["", "shared"])
def test_run_whose_cache_is_lost_in_between_fills_it_again(arguments, tmp_path, monkeypatch, place):
    folder = tmp_path / (place or "stopped/features")
    keys = STEPS | {"cache_features": True, "cache_dtype": "float8_e4m3fn"}
    run(arguments, **keys)
    keys["feature_cache"] = tmp_path / place if place else ""
    stop_after(monkeypatch, 4)
    assert medusa.main(arguments(**keys, output=tmp_path / "stopped")) == 128 + signal.SIGTERM
    monkeypatch.undo()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(before) == 2
    shutil.rmtree(folder)
    run(arguments, **keys, output=tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "stopped")
    left = {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}
    assert left == (before if place else {})


def test_run_killed_between_checkpoints_drops_the_lines_it_repeats(arguments, tmp_path, monkeypatch):
    run(arguments, **STEPS)

    def die(*given, **named):
        raise KeyboardInterrupt

    copy = tmp_path / "killed"
    calls, finish_step = [], loop.finish_step
    monkeypatch.setattr(
        loop, "finish_step", lambda *a, **k: die() if len(calls) == 6 else (calls.append(1), finish_step(*a, **k))[1]
    )
    with pytest.raises(KeyboardInterrupt):
        medusa.main(arguments(**STEPS, output=copy))
    monkeypatch.undo()
    shutil.rmtree(copy / "checkpoints" / "step-000006")  # as if it had died before it could save
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "ki')  # and while it wrote a line
    run(arguments, **STEPS, output=copy, resume=True)
    assert_same_run(tmp_path / "run", copy)


def test_going_back_to_an_earlier_checkpoint_repeats_the_run(arguments, tmp_path):
    run(arguments, **STEPS)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    run(arguments, **STEPS, output=tmp_path / "copy", resume_from=tmp_path / "copy" / "checkpoints" / "step-000004")
    assert_same_run(tmp_path / "run", tmp_path / "copy")


def test_going_back_keeps_what_is_saved_and_drops_the_steps_given_up(arguments, tmp_path, monkeypatch):
    run(arguments, max_steps=8, checkpoint_every=2, keep_checkpoints=9)
    keys = {"max_steps": 8, "checkpoint_every": 2, "keep_checkpoints": 2}
    kept, save = [], run_folder.save_checkpoint

    def save_and_look(*given, **named):
        save(*given, **named)
        kept.append([int(path.name.split("-")[1]) for path in list_checkpoints(tmp_path / "run")])

    monkeypatch.setattr(run_folder, "save_checkpoint", save_and_look)
    run(arguments, **keys, resume_from=tmp_path / "run" / "checkpoints" / "step-000002")
    assert kept == [[2, 4], [4, 6], [6, 8]]
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]


def test_run_killed_before_its_first_checkpoint_starts_again(arguments, tmp_path, monkeypatch, capsys):
    run(arguments, max_steps=4, output=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish_step", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            medusa.main(arguments(max_steps=4))
    run(arguments, max_steps=4, resume=True)
    assert "starting from step 0" in capsys.readouterr().err
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_resuming_a_finished_run_changes_nothing(arguments, tmp_path):
    run(arguments, **STEPS)
    before = all_lines(tmp_path / "run")
    run(arguments, **STEPS, resume=True)
    assert all_lines(tmp_path / "run") == before


def test_finished_run_can_be_extended(arguments, tmp_path):
    run(arguments, **STEPS)
    first = (tmp_path / "run" / "head" / "medusa_lm_head.safetensors").read_bytes()
    run(arguments, **(STEPS | {"max_steps": 12}), resume=True)
    assert [line["step"] for line in all_lines(tmp_path / "run") if line["kind"] == "train"] == list(range(1, 13))
    assert (tmp_path / "run" / "head" / "medusa_lm_head.safetensors").read_bytes() != first


def test_signal_while_features_are_computed_leaves_a_run_that_resumes(arguments, tmp_path, monkeypatch):
    keys = STEPS | {"cache_features": True}
    run(arguments, **keys)
    compute = medusa.FrozenTarget.features
    monkeypatch.setattr(
        medusa.FrozenTarget, "features", lambda *a: (os.kill(os.getpid(), signal.SIGINT), compute(*a))[1]
    )
    monkeypatch.setattr(medusa.FrozenTarget, "check", lambda *a: None)
    assert medusa.main(arguments(**keys, output=tmp_path / "stopped")) == 128 + signal.SIGINT
    monkeypatch.undo()
    run(arguments, **keys, output=tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "stopped")


def test_sigterm_to_the_launcher_saves_and_leaves_a_run_that_resumes(arguments, tmp_path):
    """As a user types it: accelerate launch, whose launcher does not hand SIGTERM on by itself."""
    keys = {"max_steps": 100_000, "checkpoint_every": 0, "log_every": 1}
    config = Path(medusa.__file__).parents[1] / "configs" / "accelerate" / "cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), medusa.__file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(tmp_path / "said.txt", "w") as said:
        process = subprocess.Popen(
            [*launch, *arguments(**keys)], env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
            while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
                assert process.poll() is None, (tmp_path / "said.txt").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
            assert process.returncode != 0
            while not list_checkpoints(tmp_path / "run"):
                assert time.monotonic() < deadline, (tmp_path / "said.txt").read_text()
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all gone, as it should be
                os.killpg(process.pid, signal.SIGKILL)
    stopped = int(list_checkpoints(tmp_path / "run")[-1].name.split("-")[1])
    assert stopped > 3
    run(arguments, max_steps=stopped + 3, checkpoint_every=0, log_every=1, resume=True)
    steps = [line["step"] for line in all_lines(tmp_path / "run") if line["kind"] == "train"]
    assert steps == list(range(1, stopped + 4))


def test_resumed_run_may_share_out_its_rows_otherwise(arguments, tmp_path, capsys):
    """As another number of processes would: 8 rows per step in one micro-step, then in four."""
    run(arguments, **STEPS, batch_rows=8)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000004"
    capsys.readouterr()
    run(arguments, **STEPS, batch_rows=2, accumulate=4, resume_from=checkpoint, output=tmp_path / "on")
    assert "batch_rows 8 -> 2, accumulate 1 -> 4" in capsys.readouterr().err
    whole, on = all_lines(tmp_path / "run"), all_lines(tmp_path / "on")
    losses = [line["loss"] for line in whole if line["kind"] == "train"]
    assert [line["loss"] for line in on if line["kind"] == "train"] == pytest.approx(losses[4:], rel=1e-5)


def test_run_continues_from_its_own_saved_config(arguments, tmp_path):
    run(arguments, **STEPS)
    config = tmp_path / "run" / "config.yaml"
    assert medusa.main(["--config", str(config), "--resume", "--max_steps", "10"]) == 0
    assert medusa.main(["--config", str(config), "--output", str(tmp_path / "again"), "--max_steps", "9"]) == 0
    assert_same_step = [all_lines(tmp_path / name)[:9] for name in ("run", "again")]
    assert assert_same_step[0] == assert_same_step[1]
