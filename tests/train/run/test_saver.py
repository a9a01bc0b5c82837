"""Checkpoints that a thread writes while the training goes on: train/run/saving/saver.py."""

import signal
import threading
import time

import pytest

from headstart.tests.train.tiny_runs import (
    all_lines,
    assert_same_run,
    in_every_step,
    newest_step,
    settle,
    terminate,
)
from headstart.tests.train.trainings import RESUMABLE
from headstart.train.run import acceptance, checkpointing
from headstart.train.run.checkpointing import list_checkpoints
from headstart.train.run.saving import saver
from headstart.train.run.saving.checkpoint_writer import CheckpointWriter
from headstart.train.run.stopping import StopSignals

SAVE_TENSORS = checkpointing._save_tensors


def files_of(run):
    return {p.relative_to(run): p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}


@pytest.mark.parametrize("training", ["medusa", "eagle3", "joint"])
def test_checkpoint_holds_its_own_step_though_the_training_went_on(trainers, finished, tmp_path, monkeypatch, training):
    whole, run, moved = finished(training, **RESUMABLE), tmp_path / "run", threading.Event()
    begin = CheckpointWriter._run

    def wait(writer, write):
        assert moved.wait(60)
        begin(writer, write)

    def look(number, trained):
        if number == 4:  # of the checkpoint of step 2 nothing is there yet, and step 3 is made
            assert list_checkpoints(run) == []
            moved.set()

    monkeypatch.setattr(CheckpointWriter, "_run", wait)
    with in_every_step(look):
        trainers[training].run(**RESUMABLE)
    assert moved.is_set()
    # The second checkpoint is not copied before the first one is whole; state.json names the run's own output.
    assert_same_run(whole, run)
    same = {
        path: path.name == "state.json" or content == files_of(whole)[path] for path, content in files_of(run).items()
    }
    assert all(same.values()), same
    assert len(same) > 9


def test_next_checkpoint_waits_for_the_one_before(trainer, monkeypatch):
    writing = []

    def count(value, path):
        writing.append(path)
        time.sleep(0.2)
        SAVE_TENSORS(value, path)
        assert writing == [path]
        writing.pop()

    monkeypatch.setattr(checkpointing, "_save_tensors", count)
    trainer.run(max_steps=3, checkpoint_every=1)


def test_error_of_the_thread_ends_the_run_at_the_next_step(trainer, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    steps = []

    def look(number, trained):
        settle()
        steps.append(number)

    monkeypatch.setattr(checkpointing, "_save_tensors", refuse)
    with in_every_step(look), pytest.raises(OSError, match=r"step-000002 .No space left on device"):
        trainer.main(max_steps=9, checkpoint_every=2)
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(("grace", "saved"), [(0.1, 4), (20, 5)])
def test_stopped_run_that_was_writing_leaves_in_time(trainer, finished, tmp_path, monkeypatch, capsys, grace, saved):
    """It finishes what it was writing; a newer checkpoint follows if both fit into the time."""

    def slow(value, path):
        time.sleep(0.3)
        SAVE_TENSORS(value, path)

    def stop(number, trained):
        if number == 4:
            settle()
        elif number == 5:
            assert "checkpoint writer" in {thread.name for thread in threading.enumerate()}
            terminate()

    monkeypatch.setattr(checkpointing, "_save_tensors", slow)
    monkeypatch.setattr(saver, "GRACE", grace)
    with in_every_step(stop):
        assert trainer.main(**RESUMABLE) == 128 + signal.SIGTERM
    assert newest_step(tmp_path / "run") == saved
    told = "no time was left to write a checkpoint of step 5: the run goes on from 4" in capsys.readouterr().err
    assert told == (saved == 4)
    monkeypatch.undo()
    assert_same_run(finished("medusa", **RESUMABLE), trainer.run(**RESUMABLE, resume=True))


def test_signal_that_comes_while_the_run_waits_to_save_begins_no_further_write(
    trainer, finished, tmp_path, monkeypatch
):
    keys, waited, noted = RESUMABLE | {"checkpoint_every": 1}, [], threading.Event()
    wait, note = CheckpointWriter.wait, StopSignals._note

    def wait_and_say(writer):
        waited.append(writer.thread)
        wait(writer)

    def note_and_say(*given):
        note(*given)
        noted.set()

    def slow(value, path):
        if "step-000002" in str(path) and path.name == "optimizer.pt":
            begun = time.monotonic()
            while threading.current_thread() not in waited:  # the training, with the checkpoint of step 3
                assert time.monotonic() - begun < 60
                time.sleep(0.01)
            time.sleep(0.2)  # longer than GRACE
            terminate()
            assert noted.wait(60)  # Python calls the handler in the main thread, once it gets there
        SAVE_TENSORS(value, path)

    monkeypatch.setattr(CheckpointWriter, "wait", wait_and_say)
    monkeypatch.setattr(StopSignals, "_note", note_and_say)
    monkeypatch.setattr(checkpointing, "_save_tensors", slow)
    monkeypatch.setattr(saver, "GRACE", 0.1)
    assert trainer.main(**keys) == 128 + signal.SIGTERM
    assert newest_step(tmp_path / "run") == 2
    monkeypatch.undo()
    assert_same_run(finished("medusa", **keys), trainer.run(**keys, resume=True))


def test_stopped_run_that_was_not_writing_saves_however_long_it_takes(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "GRACE", 0)

    def stop(number, trained):
        settle()
        if number == 5:
            terminate()

    with in_every_step(stop):
        assert trainer.main(**RESUMABLE) == 128 + signal.SIGTERM
    assert newest_step(tmp_path / "run") == 5


def test_signal_ends_a_measurement_which_the_resumed_run_makes(trainer, finished, tmp_path, monkeypatch):
    keys = RESUMABLE | {"eval_every": 3, "eval_prompts": 2, "eval_tokens": 6}
    whole, measure = finished("medusa", **keys), acceptance.measure_acceptance

    def stopped(*given):
        terminate()
        return measure(*given)

    monkeypatch.setattr(acceptance, "measure_acceptance", stopped)
    assert trainer.main(**keys) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert (newest_step(tmp_path / "run"), all_lines(tmp_path / "run", "acceptance")) == (3, [])
    assert_same_run(whole, trainer.run(**keys, resume=True))


def test_checkpoints_heads_are_logged_once_they_are_whole(trainer, tmp_path, monkeypatch):
    from headstart.train.run.tracking import WandbTracker

    logged = []
    monkeypatch.setattr(
        WandbTracker,
        "log_checkpoint",
        lambda self, folder, step, told: logged.append((step, folder.is_dir(), told["family"])),
    )
    trainer.run(max_steps=5, checkpoint_every=2, log_checkpoints=True)
    assert logged == [(2, True, "Medusa"), (4, True, "Medusa"), (5, True, "Medusa")]
