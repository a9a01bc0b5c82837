"""Runs that are stopped, killed or gone back in go on from their checkpoints as if nothing had been.

The checkpoints themselves: run/test_checkpointing.py; runs that may not go on: run/test_run_folder.py; launched ones:
test_launched.py.
"""

import os
import shutil
import signal

import pytest

from headstart.tests.train.tiny_runs import (
    Killed,
    all_lines,
    assert_rates_are_those_of_their_step,
    assert_same_run,
    die,
    head_tensors,
    in_every_step,
    in_step,
    newest_step,
    settle,
    terminate,
)
from headstart.tests.train.trainings import RESUMABLE, START
from headstart.train import medusa
from headstart.train.run.checkpointing import list_checkpoints
from headstart.train.teacher.features import FrozenTarget

MEASURED = RESUMABLE | {"eval_every": 3, "eval_prompts": 2, "eval_tokens": 6}
LK = {"loss": "lk"}  # which hangs on the step before

# Where a checkpoint is due (2, 4), where a measurement is due (3), and where neither is (5).
STOPPED = {
    **{
        f"medusa{', cached' * cached}, step {step}": ("medusa", step, LK | {"accumulate": 2, "cache_features": cached})
        for cached in (False, True)
        for step in (2, 3, 5)
    },
    "mlp_speculator, cached": ("mlp_speculator", 3, LK | {"cache_features": True, "accumulate": 2}),
    "mlp_speculator, not tied": ("mlp_speculator", 5, {"tie_weights": False}),
    "eagle": ("eagle", 3, LK),
    "eagle3, narrow": ("eagle3", 4, LK | {"hidden_size": 16}),
    "block": ("block", 3, LK | {"accumulate": 2}),
    "block, cached": ("block", 5, LK | {"cache_features": True}),
    "joint, dropout": ("joint", 3, {"lora_dropout": 0.3, "accumulate": 2}),
    "joint, bfloat16": ("joint", 5, LK | {"target_dtype": "bfloat16"}),
    "stage 2": ("stage 2", 4, {}),
}


@pytest.mark.parametrize(("training", "step", "keys"), STOPPED.values(), ids=STOPPED)
def test_run_stopped_by_a_signal_goes_on_bit_by_bit(trainers, finished, start, tmp_path, training, step, keys):
    """And needs nothing of the run that it started from."""
    trainer, keys = trainers[training], MEASURED | keys
    whole = finished(training, **keys)
    if trainer.training.recipe.get("start_from") is START:
        keys["start_from"] = shutil.copytree(start(trainer.training.family), tmp_path / "start")
    with in_step(step, terminate):
        assert trainer.main(**keys) == 128 + signal.SIGTERM
    assert newest_step(tmp_path / "run") == step
    assert not (tmp_path / "run" / "head").exists()
    shutil.rmtree(tmp_path / "start", ignore_errors=True)
    assert_same_run(whole, trainer.run(**keys, resume=True))
    assert [line["step"] for line in all_lines(tmp_path / "run", "acceptance")] == [3, 6]
    if keys.get("loss") == "lk":
        assert_rates_are_those_of_their_step(tmp_path / "run")


GONE_BACK = {
    "medusa": ("medusa", {}),
    "mlp_speculator": ("mlp_speculator", {}),
    "eagle": ("eagle", {}),
    "eagle, cached": ("eagle", {"cache_features": True}),
    "eagle3": ("eagle3", {}),
    "eagle3, cached": ("eagle3", {"cache_features": True}),
    "eagle3, narrow": ("eagle3", {"hidden_size": 16}),
    "block": ("block", {}),
}


@pytest.mark.parametrize(("family", "keys"), GONE_BACK.values(), ids=GONE_BACK)
def test_going_back_to_an_earlier_checkpoint_repeats_the_run(trainers, finished, copied, family, keys):
    keys = RESUMABLE | LK | {"max_steps": 4, "eval_every": 3, "eval_prompts": 2, "eval_tokens": 5} | keys
    whole, copy = finished(family, **keys), copied(family, **keys)
    trainers[family].run(**keys, output=copy, resume_from=copy / "checkpoints" / "step-000002")
    assert_same_run(whole, copy)
    assert [line["step"] for line in all_lines(copy, "acceptance")] == [3, 4]
    assert_rates_are_those_of_their_step(copy)


# ---- what happens to the run folder, whatever the family ----


@pytest.mark.parametrize("place", ["", "shared"])
def test_run_whose_cache_is_lost_in_between_fills_it_again(trainer, finished, tmp_path, place):
    folder = tmp_path / (place or "run/features")
    keys = RESUMABLE | {"cache_features": True, "cache_dtype": "float8_e4m3fn"}
    whole = finished("medusa", **keys)
    keys["feature_cache"] = tmp_path / place if place else ""
    with in_step(4, terminate):
        assert trainer.main(**keys) == 128 + signal.SIGTERM
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(before) == 2
    shutil.rmtree(folder)
    assert_same_run(whole, trainer.run(**keys, resume=True))
    left = {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}
    assert left == (before if place else {})


def test_run_killed_between_checkpoints_drops_the_lines_it_repeats(trainer, finished, tmp_path):
    whole, run = finished("medusa", **MEASURED), tmp_path / "run"
    with in_step(6, die), pytest.raises(Killed):
        trainer.main(**MEASURED)
    shutil.rmtree(run / "checkpoints" / "step-000004")  # as if it had died before it could save
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "ki')  # and while it wrote a line
    assert_same_run(whole, trainer.run(**MEASURED, resume=True))


def test_run_killed_between_the_renames_of_its_head_writes_it_again(trainer, finished, copied):
    run = copied("medusa", **RESUMABLE)
    (run / "head").rename(run / ".head.old")
    shutil.copytree(run / ".head.old", run / ".head.new")
    assert_same_run(finished("medusa", **RESUMABLE), trainer.run(**RESUMABLE, output=run, resume=True))


def test_run_killed_before_its_first_checkpoint_starts_again(trainer, finished, capsys):
    with in_step(1, die), pytest.raises(Killed):
        trainer.main(**RESUMABLE)
    run = trainer.run(**RESUMABLE, resume=True)
    assert "starting from step 0" in capsys.readouterr().err
    assert_same_run(finished("medusa", **RESUMABLE), run)


def test_going_back_keeps_what_is_saved_and_drops_the_steps_given_up(trainer, copied, tmp_path):
    run, first, kept = copied("medusa", **RESUMABLE), 3, {}

    def look(number, trained):
        settle()
        kept[first - 1 + number] = [path.name[-1] for path in list_checkpoints(run)]

    keys = RESUMABLE | {"keep_checkpoints": 2, "output": run}
    with in_every_step(look):
        trainer.run(**keys, resume_from=run / "checkpoints" / "step-000002")
    assert (kept[4], kept[5]) == (["2", "4", "6"], ["2", "4"])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000004", "step-000006"]


def test_resuming_a_finished_run_changes_nothing(trainer, finished, copied):
    run = trainer.run(**MEASURED, output=copied("medusa", **MEASURED), resume=True)
    assert_same_run(finished("medusa", **MEASURED), run)


def test_finished_run_can_be_extended(trainer, finished, copied):
    keys, first = RESUMABLE | {"max_steps": 8}, finished("medusa", **RESUMABLE)
    run = trainer.run(**keys, output=copied("medusa", **RESUMABLE), resume=True)
    assert [line["step"] for line in all_lines(run, "train")] == list(range(1, 9))
    before, after = head_tensors(first), head_tensors(run)
    assert any((after[name] != before[name]).any() for name in before)


def test_signal_while_features_are_computed_leaves_a_run_that_resumes(trainer, finished, monkeypatch):
    keys, compute = RESUMABLE | {"cache_features": True}, FrozenTarget.features

    def signal_and_compute(*given):
        if len(given[1]) > 1:  # rows; the check computes one at a time
            os.kill(os.getpid(), signal.SIGINT)
        return compute(*given)

    whole = finished("medusa", **keys)
    with monkeypatch.context() as patch:
        patch.setattr(FrozenTarget, "features", signal_and_compute)
        assert trainer.main(**keys) == 128 + signal.SIGINT
    assert_same_run(whole, trainer.run(**keys, resume=True))


def test_resumed_run_may_share_out_its_rows_otherwise(trainer, finished, capsys):
    """As another number of processes would: 8 rows per step in one micro-step, then in four."""
    whole = finished("medusa", **RESUMABLE, batch_rows=8)
    keys = RESUMABLE | {"batch_rows": 2, "accumulate": 4}
    run = trainer.run(**keys, resume_from=whole / "checkpoints" / "step-000004")
    assert "batch_rows 8 -> 2, accumulate 1 -> 4" in capsys.readouterr().err
    losses = [line["loss"] for line in all_lines(whole, "train")]
    assert [line["loss"] for line in all_lines(run, "train")] == pytest.approx(losses[4:], rel=1e-5)


def test_run_continues_from_its_own_saved_config(trainer, tmp_path):
    run = trainer.run(max_steps=3, eval_every=2, eval_prompts=2, eval_tokens=5)
    config = ["--config", str(run / "config.yaml")]
    assert medusa.main([*config, "--resume", "--max_steps", "4"]) == 0
    assert medusa.main([*config, "--output", str(tmp_path / "again"), "--max_steps", "3"]) == 0
    extended, again = all_lines(run), all_lines(tmp_path / "again")
    assert [line["step"] for line in extended] == [1, 2, 2, 3, 3, 4, 4]
    assert extended[:5] == again
