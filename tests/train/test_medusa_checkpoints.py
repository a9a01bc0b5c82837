"""Runs that are stopped, resumed, damaged or in the way of another."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.tests.train.conftest import all_lines, assert_rates_are_those_of_their_step
from headstart.train import medusa
from headstart.train.run import run_folder
from headstart.train.run.checkpointing import (
    describe_rows_per_step,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from headstart.train.run.optimization import build_optimizer

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
    calls, finish_step = [], medusa.finish_step

    def finish_and_signal(*arguments):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return finish_step(*arguments)

    monkeypatch.setattr(medusa, "finish_step", finish_and_signal)


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

    def die(*arguments):
        raise KeyboardInterrupt

    copy = tmp_path / "killed"
    calls, finish_step = [], medusa.finish_step
    monkeypatch.setattr(
        medusa, "finish_step", lambda *a: die() if len(calls) == 6 else (calls.append(1), finish_step(*a))[1]
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

    def save_and_look(*arguments):
        save(*arguments)
        kept.append([int(path.name.split("-")[1]) for path in list_checkpoints(tmp_path / "run")])

    monkeypatch.setattr(run_folder, "save_checkpoint", save_and_look)
    run(arguments, **keys, resume_from=tmp_path / "run" / "checkpoints" / "step-000002")
    assert kept == [[2, 4], [4, 6], [6, 8]]
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]


def test_checkpoint_stays_until_the_one_in_its_place_is_whole(tmp_path, monkeypatch):
    head, accelerator = Medusa(MedusaConfig(4, 5, num_heads=1)), Accelerator()
    optimizer = build_optimizer(head, 0.0, 0.9, 0.999)
    save_checkpoint(tmp_path, 2, head, optimizer, {"try": 1}, accelerator, num_kept=2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, 2, head, optimizer, {"try": 2}, accelerator, num_kept=2)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert (read_state(folder)["try"], find_damage(folder)) == (1, "")
    save_checkpoint(tmp_path, 2, head, optimizer, {"try": 3}, accelerator, num_kept=2)
    assert list((tmp_path / "checkpoints").iterdir()) == [folder]
    assert (read_state(folder)["try"], find_damage(folder)) == (3, "")


@pytest.mark.parametrize("new", [True, False])
def test_checkpoint_that_was_being_replaced_is_found_again(arguments, tmp_path, new):
    """Killed between the two renames that put a new checkpoint in the place of an old one."""
    run(arguments, **STEPS)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    checkpoints = tmp_path / "killed" / "checkpoints"
    for name in ("step-000006", "step-000008"):
        shutil.rmtree(checkpoints / name)
    (checkpoints / "step-000009").rename(checkpoints / "..step-000009.new.partial-01234567")
    old = checkpoints / ".step-000004.old"
    (checkpoints / "step-000004").rename(old)
    if new:
        shutil.copytree(old, checkpoints / ".step-000004.new")
        (old / "state.json").write_text("{}")  # what was put aside is not what goes on
    run(arguments, **STEPS, output=tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "killed")
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]


def test_checkpoint_that_was_being_removed_is_not_there(tmp_path, monkeypatch):
    head, accelerator = Medusa(MedusaConfig(4, 5, num_heads=1)), Accelerator()
    optimizer, remove = build_optimizer(head, 0.0, 0.9, 0.999), shutil.rmtree

    def remove_half(path, ignore_errors=False):
        remove(path if ignore_errors else path / "head", ignore_errors)
        if not ignore_errors:
            raise KeyboardInterrupt

    save_checkpoint(tmp_path, 2, head, optimizer, {}, accelerator, num_kept=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_half)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 4, head, optimizer, {}, accelerator, num_kept=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004"]
    assert (tmp_path / "checkpoints" / ".step-000002.gone" / "state.json").exists()


def test_folder_that_was_hardly_begun_is_as_good_as_none(arguments, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml.partial").write_text("target: hal")
    with pytest.raises(ValueError, match=r"there is no run in .* leave --resume out"):
        medusa.main(arguments(max_steps=2, resume=True))
    run(arguments, max_steps=2)
    assert not (tmp_path / "run" / "config.yaml.partial").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoint_of_one_run_does_not_overwrite_another(arguments, tmp_path, resume):
    for name in ("one", "other"):
        run(arguments, max_steps=2, checkpoint_every=2, output=tmp_path / name)
    other = tmp_path / "other"
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    checkpoint = tmp_path / "one" / "checkpoints" / "step-000002"
    with pytest.raises(ValueError, match=r"other' already holds .* would overwrite: name a new output"):
        medusa.main(arguments(max_steps=4, output=other, resume_from=checkpoint, resume=resume))
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    run(arguments, max_steps=4, output=tmp_path / "new", resume_from=checkpoint)


def test_folder_without_a_checkpoint_is_not_started_over(arguments, tmp_path):
    run(arguments, max_steps=2)
    folder = tmp_path / "run"
    shutil.rmtree(folder / "checkpoints")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"holds a finished head/ and no checkpoint.*name a new output"):
        medusa.main(arguments(max_steps=2, resume=True))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    shutil.rmtree(folder / "head")
    (folder / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"neither a checkpoint nor a config\.yaml"):
        medusa.main(arguments(max_steps=2, resume=True))


def test_run_killed_before_its_first_checkpoint_starts_again(arguments, tmp_path, monkeypatch, capsys):
    run(arguments, max_steps=4, output=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(medusa, "finish_step", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
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


def test_only_the_newest_checkpoints_stay(arguments, tmp_path):
    run(arguments, max_steps=9, checkpoint_every=2, keep_checkpoints=2)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000008", "step-000009"]
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"checkpoints", "config.yaml", "head", "metrics.jsonl"}


@pytest.mark.parametrize("name", ["optimizer.pt", "rng.pt", "head/medusa_lm_head.safetensors", "state.json"])
def test_checkpoint_cut_in_half_is_named_with_the_one_before(arguments, tmp_path, name):
    run(arguments, max_steps=6, checkpoint_every=2, keep_checkpoints=3)
    newest = tmp_path / "run" / "checkpoints" / "step-000006"
    content = (newest / name).read_bytes()
    (newest / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"step-000006/{name} .*--resume_from .*step-000004"):
        medusa.main(arguments(max_steps=8, checkpoint_every=2, keep_checkpoints=3, resume=True))
    run(arguments, max_steps=8, checkpoint_every=2, keep_checkpoints=3, resume_from=newest.parent / "step-000004")


def test_flipped_byte_and_missing_file_are_damage(arguments, tmp_path):
    run(arguments, max_steps=2, checkpoint_every=2)
    path = tmp_path / "run" / "checkpoints" / "step-000002" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"optimizer.pt are not those that were written; no earlier one is whole"):
        medusa.main(arguments(max_steps=3, resume=True))
    path.unlink()
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing"):
        medusa.main(arguments(max_steps=3, resume=True))


def test_existing_run_folder_is_left_alone(arguments, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds notes.txt: add --resume"):
        medusa.main(arguments())
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match=r"is a file: name a new run folder"):
        medusa.main(arguments(output=folder / "notes.txt"))


def test_folder_of_a_run_that_never_began_is_taken(arguments, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("target: one that was refused\n")
    run(arguments, max_steps=1)
    assert (tmp_path / "run" / "head").is_dir()


def test_processes_that_do_not_know_of_each_other_are_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were launched, and accelerate runs each of them alone"):
        medusa.main(arguments())
    assert not (tmp_path / "run").exists()


def test_nothing_to_resume_is_an_error(arguments, tmp_path):
    with pytest.raises(ValueError, match=r"there is no run in .* to resume"):
        medusa.main(arguments(resume=True))
    with pytest.raises(ValueError, match="there is no such checkpoint folder"):
        medusa.main(arguments(resume_from=tmp_path / "step-000002"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("lr", 0.5), ("num_heads", 2), ("seed", 3), ("autocast", "bf16")])
def test_resumed_run_keeps_its_recipe(arguments, name, value):
    run(arguments, max_steps=2)
    with pytest.raises(ValueError, match=f"started with {name} .*, not {value!r}"):
        medusa.main(arguments(max_steps=4, resume=True, **{name: value}))


def test_a_run_does_not_end_before_where_it_is(arguments, tmp_path):
    """And nothing of it is written anew: the same command without the key goes on."""
    run(arguments, max_steps=4)
    before = (tmp_path / "run" / "config.yaml").read_text()
    for keys in ({"max_steps": 3}, {"max_steps": 0, "num_epochs": 0.05}):
        with pytest.raises(
            ValueError, match=r"has 4 steps behind it, and the run shall end after [13]: set max_steps to at least 4"
        ):
            medusa.main(arguments(resume=True, **keys))
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    run(arguments, max_steps=4, resume=True)


def test_a_key_that_the_checkpoint_does_not_know_counts_as_its_default(arguments, tmp_path):
    run(arguments, max_steps=2)
    state = list_checkpoints(tmp_path / "run")[-1] / "state.json"
    found = json.loads(state.read_text())
    del found["recipe"]["weight_decay"]
    state.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"started with weight_decay 0\.0, not 0\.1"):
        medusa.main(arguments(max_steps=3, resume=True, weight_decay=0.1))
    run(arguments, max_steps=3, resume=True)


def test_checkpoint_whose_lk_followed_no_rates_is_refused(arguments, tmp_path):
    run(arguments, max_steps=2, loss="lk")
    state = list_checkpoints(tmp_path / "run")[-1] / "state.json"
    found = json.loads(state.read_text())
    del found["rates"]
    state.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="another version, whose lk did not follow the mean rate of acceptance"):
        medusa.main(arguments(max_steps=4, resume=True, loss="lk"))


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


def test_resumed_run_keeps_its_rows_per_step_and_says_how(arguments):
    run(arguments, max_steps=2, batch_rows=4, accumulate=3)
    for keys, advice in (
        ({"batch_rows": 2}, "set accumulate to 6"),
        ({"accumulate": 4}, "set accumulate to 3"),
        ({"batch_rows": 5}, "set batch_rows and accumulate so that their product is 12"),
    ):
        with pytest.raises(
            ValueError, match=rf"with 12 rows per optimiser step, now .* x 1 processes make \d+,.*: {advice}"
        ):
            medusa.main(arguments(max_steps=4, resume=True, **({"batch_rows": 4, "accumulate": 3} | keys)))


def test_advice_counts_the_processes():
    recipe = {"batch_rows": 4, "accumulate": 2}
    assert "set accumulate to 4" in describe_rows_per_step(64, 32, recipe)  # 4 processes
    assert "their product is 3" in describe_rows_per_step(12, 32, recipe)
    assert "a number of processes that divides 62" in describe_rows_per_step(62, 32, recipe)


def test_resumed_run_needs_the_same_data(arguments, conversations, tmp_path):
    data = tmp_path / "data.jsonl"
    shutil.copy(conversations, data)
    run(arguments, max_steps=2, data=data)
    data.write_text("\n".join(data.read_text().splitlines()[:-5]))
    with pytest.raises(ValueError, match="the data gives other rows"):
        medusa.main(arguments(max_steps=4, data=data, resume=True))


def test_run_continues_from_its_own_saved_config(arguments, tmp_path):
    run(arguments, **STEPS)
    config = tmp_path / "run" / "config.yaml"
    assert medusa.main(["--config", str(config), "--resume", "--max_steps", "10"]) == 0
    assert medusa.main(["--config", str(config), "--output", str(tmp_path / "again"), "--max_steps", "9"]) == 0
    assert_same_step = [all_lines(tmp_path / name)[:9] for name in ("run", "again")]
    assert assert_same_step[0] == assert_same_step[1]


def test_full_disk_keeps_the_earlier_checkpoint(arguments, tmp_path, monkeypatch):
    save, calls = torch.save, []

    def full(*arguments):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"step-000004 \(No space left on device\); nothing half-written is left"):
        medusa.main(arguments(max_steps=6, checkpoint_every=2))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    monkeypatch.undo()
    run(arguments, max_steps=6, checkpoint_every=2, resume=True)


def test_disk_that_is_really_full_is_one_line(arguments, tmp_path):
    """A process that may write the head but no file as large as the optimiser's."""
    run(arguments, max_steps=2, output=tmp_path / "complete")
    folder = list_checkpoints(tmp_path / "complete")[-1]
    sizes = [(folder / name).stat().st_size for name in ("head/medusa_lm_head.safetensors", "optimizer.pt")]
    assert sizes[0] < sizes[1]
    script = (
        "import resource, runpy, sys; from headstart.train import medusa;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2);"
        "runpy.run_path(medusa.__file__, run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(sum(sizes) // 2), *arguments(max_steps=2)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert last.startswith(f"error: [Errno 27] cannot write {checkpoint} (")
    assert last.endswith("File too large); nothing half-written is left")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_random_generators_go_on_where_they_were(tmp_path):
    head, accelerator = Medusa(MedusaConfig(4, 5, num_heads=1)), Accelerator()
    optimizer = build_optimizer(head, 0.0, 0.9, 0.999)

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()

    draw()  # an odd number of normal draws: numpy keeps the second of a pair
    save_checkpoint(tmp_path, 1, head, optimizer, {}, accelerator, num_kept=1)
    expected = draw()
    draw()
    load_checkpoint(tmp_path / "checkpoints" / "step-000001", head, optimizer, accelerator)
    assert draw() == expected
