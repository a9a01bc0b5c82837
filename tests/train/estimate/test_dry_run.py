"""A dry run checks and tells what a run would take, and leaves nothing behind."""

import re

import pytest
import torch

from headstart.tests.train.tiny_runs import all_lines, assert_same_run
from headstart.tests.train.trainings import CHEAP, TRAININGS
from headstart.train.estimate import dry_run
from headstart.train.estimate.dry_run import describe_seconds, rehearse
from headstart.train.run import loop, run_lock
from headstart.train.run.optimization import NonFiniteLoss


@pytest.mark.parametrize("training", TRAININGS)
def test_it_tells_and_trains_nothing(trainers, finished, tmp_path, capsys, monkeypatch, training):
    whole = finished(training, **CHEAP)
    keys = CHEAP | {"accumulate": 2} if training == "medusa" else CHEAP
    capsys.readouterr()
    (tmp_path / "run").mkdir()
    held = dict(run_lock._held)  # other tests' runs may have ended half-way
    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish_step", None)
        assert trainers[training].main(**keys, dry_run=True) == 0
    said = capsys.readouterr().err
    assert said.count("memory: about 0.0 GiB: target") == 1
    rows = 4 if training == "medusa" else 2
    assert re.search(rf"dry run: a step of {rows} rows took \d+\.\d\d s, ", said)
    assert re.search(
        r"dry run: 2 steps would take about \d+ s, beside measuring and saving\. Nothing was trained", said
    )
    assert list((tmp_path / "run").iterdir()) == []
    assert run_lock._held == held
    assert_same_run(whole, trainers[training].run(**CHEAP))


def test_nothing_is_written_by_a_tracker_or_a_cache(trainer, tmp_path, logged_out):
    keys = {"cache_features": True, "eval_prompts": 2, "eval_tokens": 6, "tracker": "wandb"}
    assert trainer.main(**keys, dry_run=True) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_features_that_are_kept_are_computed_once(monkeypatch):
    """A step of 10 s, 4 of them the target's; 1,000 rows of which a step takes 20, five epochs."""
    clock, told, computed = [0.0], [], []
    monkeypatch.setattr(dry_run.time, "perf_counter", lambda: clock[0])

    def compute(step):
        computed.append(step)
        clock[0] += 4

    sizes = {
        "num_steps": 250,
        "rows_per_step": 20,
        "row_length": 64,
        "device": torch.device("cpu"),
        "note": told.append,
    }
    for cached in (1000, 0):
        for _ in rehearse(iter(["first", "second"]), **sizes, cached=cached, compute=compute):
            clock[0] += 10
    assert computed == ["second"]
    kept, plain = told[1::2]
    assert (
        "the features of 1,000 rows would take about 3 min once, unless they are kept already; then 250 steps" in kept
    )
    assert "250 steps would take about 25 min, beside" in kept
    assert "dry run: 250 steps would take about 42 min, beside" in plain


def test_a_run_with_a_cache_tells_what_its_features_take(trainer, capsys):
    assert trainer.main(cache_features=True, dry_run=True) == 0
    assert re.search(r"the features of \d+ rows would take about \d+ s once, unless", capsys.readouterr().err)


def test_what_the_run_would_refuse_is_refused(trainer, tmp_path):
    for keys, message in (
        ({"eval_prompts": 99}, "eval_prompts"),
        ({"row_length": 512}, "row_length 512 is more than the target's 256 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.main(**keys, dry_run=True)
    run = trainer.run(max_steps=1)
    with pytest.raises(ValueError, match="already holds"):
        trainer.main(max_steps=1, dry_run=True)
    with pytest.raises(ValueError, match="dry_run looks at a new run: leave resume and resume_from out"):
        trainer.main(max_steps=1, dry_run=True, resume=True)
    assert len(all_lines(run)) == 1


def test_loss_that_is_not_finite_is_told(trainer, monkeypatch):
    monkeypatch.setattr(loop, "accumulate_gradients", lambda *_, **__: torch.full((3, 5), torch.nan))
    with pytest.raises(NonFiniteLoss, match="the loss of the first step is not finite"):
        trainer.main(dry_run=True)


def test_times_are_told_in_the_unit_that_suits_them():
    told = [describe_seconds(seconds) for seconds in (0.4, 89, 90, 5399, 5400, 129_599, 129_600)]
    assert told == ["0 s", "89 s", "2 min", "90 min", "1.5 h", "36.0 h", "1.5 days"]
