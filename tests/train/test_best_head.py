"""best/ of a run: which measurement puts a head there, what a resumed run finds, and when a run without a better one ends."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.checkpoint import load_head
from headstart.heads.storage.atomic_write import write_json
from headstart.hub_export.export import main as export
from headstart.tests.train.tiny_runs import (
    Killed,
    all_lines,
    assert_same_run,
    assert_same_tensors,
    die,
    head_tensors,
    in_step,
    terminate,
)
from headstart.train.report.report import write_report
from headstart.train.run.acceptance import AcceptanceMeter
from headstart.train.run.saving.best_head import best_measurement

WEIGHTS = "medusa_lm_head.safetensors"
KEYS = {"max_steps": 6, "checkpoint_every": 2, "eval_every": 1, "eval_prompts": 2, "keep_checkpoints": 9}


@pytest.fixture
def measure(monkeypatch):
    """measure(length, ...): the next measurements give these acceptance lengths, or (length, held-out loss)."""

    def script(*given):
        figures = iter([one if isinstance(one, tuple) else (one, 2.0) for one in given])

        def measured(self, stop):
            length, loss = next(figures)
            told = {"acceptance_length": length, "per_position": [length - 1], "num_steps": 9, "samples": []}
            return told | {"source": "engine", "head_loss": loss}

        monkeypatch.setattr(AcceptanceMeter, "measure", measured)

    return script


def best_step(run):
    return json.loads((run / "best" / "acceptance.json").read_text())["step"]


def test_longest_acceptance_decides_then_the_lower_loss(trainer, measure):
    measure(1.2, 1.5, (1.5, 1.9), (1.4, 0.1), (1.5, 1.9), (1.5, float("nan")))
    run = trainer.run(**KEYS | {"checkpoint_every": 1})
    assert best_step(run) == 3
    best = load_file(run / "best" / WEIGHTS)
    assert_same_tensors(best, load_file(run / "checkpoints" / "step-000003" / "head" / WEIGHTS))
    assert not torch.equal(best["0.0.linear.weight"], load_file(run / "head" / WEIGHTS)["0.0.linear.weight"])
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_figures_of_another_source_do_not_compare():
    forced = {"kind": "acceptance", "step": 1, "acceptance_length": 3.0, "source": "teacher_forced"}
    engine = {"kind": "acceptance", "step": 2, "acceptance_length": 1.5, "source": "engine", "head_loss": 1.0}
    worse = engine | {"step": 3, "acceptance_length": 1.25}
    assert best_measurement([forced, {"kind": "train", "step": 2}, engine, worse]) == (engine, 1)
    assert best_measurement([]) == (None, 0)


def test_figures_of_other_prompts_do_not_compare():
    line = {"kind": "acceptance", "source": "engine", "acceptance_length": 2.0}
    old, one, other = line, line | {"measured_on": "one"}, line | {"measured_on": "other", "acceptance_length": 1.5}
    assert best_measurement([one, other, other]) == (other, 1)
    assert best_measurement([one, other, one, one]) == (one, 1), (
        "what was measured between has taken its place in best/"
    )
    assert best_measurement([old, other]) == (old, 1), "what an older version wrote"


def test_run_resumed_with_other_prompts_begins_its_comparison_anew(trainer, conversations, tmp_path, capsys):
    """By the prompts themselves: the same ones under another name, or for other reports, compare."""
    lines = Path(conversations).read_text().splitlines()
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for path, some in zip(paths, (lines[:3], lines[:3], lines[3:6])):
        path.write_text("\n".join(some).replace("w1", "w0"))
    keys = {"checkpoint_every": 2, "eval_every": 2, "eval_prompts": 3, "eval_tokens": 6, "max_steps": 2}
    run = trainer.run(**keys, eval_data=paths[0])
    for steps, changed, anew in (
        (4, {"eval_data": paths[1]}, False),
        (6, {"eval_data": paths[2]}, True),
        (8, {"eval_data": paths[2], "eval_tokens": 5}, True),
    ):
        capsys.readouterr()
        trainer.run(**keys | changed | {"max_steps": steps}, resume=True)
        told = f"figures from step {steps - 2} on do not compare with those before: the prompts (eval_data) or eval_tokens have"
        assert (told in capsys.readouterr().err) == anew
        assert not anew or best_step(run) >= steps - 2
    found = [line["measured_on"] for line in all_lines(run, "acceptance")]
    assert [line["step"] for line in all_lines(run, "acceptance")] == [2, 4, 4, 6, 6, 8]
    assert [found[i] == found[i + 1] for i in range(5)] == [True, False, True, False, True]
    assert len(set(found)) == 3
    assert json.loads((run / "best" / "acceptance.json").read_text())["measured_on"] == found[-1]


def test_ended_run_is_measured_on_other_prompts(trainer, conversations, tmp_path):
    """In the same step, and once."""
    lines = [line.replace("w1", "w0") for line in Path(conversations).read_text().splitlines()]
    for name, some in (("a", lines[:3]), ("b", lines[3:6])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some))
    keys = {"checkpoint_every": 2, "eval_every": 1, "eval_prompts": 3, "eval_tokens": 6, "max_steps": 4, "patience": 2}
    keys |= {"lr": 0, "eval_data": tmp_path / "a.jsonl"}
    run = trainer.run(**keys)
    assert [line["step"] for line in all_lines(run, "acceptance")] == [1, 2, 3]
    weights = head_tensors(run)
    for _ in range(2):
        trainer.run(**keys | {"eval_data": tmp_path / "b.jsonl", "max_steps": 3}, resume=True)
        found = all_lines(run, "acceptance")
        assert [line["step"] for line in found] == [1, 2, 3, 3]
        assert json.loads((run / "best" / "acceptance.json").read_text())["measured_on"] == found[-1]["measured_on"]
        assert not [path.name for path in run.iterdir() if path.name.startswith(".")]
    assert_same_tensors(weights, load_file(run / "best" / WEIGHTS))


def test_a_run_by_its_name_is_its_best_head(trainer, measure, tmp_path, capsys):
    measure(1.2, 1.75, 1.3, 1.3, 1.3, 1.3)
    run = trainer.run(**KEYS)
    assert f"the best head is that of step 2, in {run / 'best'}" in capsys.readouterr().err
    loaded = load_head(run).state_dict()
    assert_same_tensors(loaded, load_head(run / "best").state_dict())
    assert_same_tensors(loaded, load_head(run / "checkpoints" / "step-000002").state_dict())
    assert export([str(run), "--format", "medusa", "--output", str(tmp_path / "best")]) == 0
    assert f"taking {run / 'best'}, the head that was measured best; {run / 'head'} is that" in capsys.readouterr().out
    card = (tmp_path / "best" / "README.md").read_text()
    assert "the best that were measured in the run, those of training step 2" in card
    assert "| acceptance length | 1.75 |" in card
    assert export([str(run / "head"), "--format", "medusa", "--output", str(tmp_path / "last")]) == 0
    assert "measured best" not in capsys.readouterr().out
    last = load_file(tmp_path / "last" / WEIGHTS)
    assert_same_tensors(last, head_tensors(run))


def test_patience_ends_the_run_and_is_told(trainer, measure):
    measure(1.2, 1.5, 1.4, 1.5, 1.6)
    keys = KEYS | {"max_steps": 9, "patience": 2}
    run = trainer.run(**keys)
    assert all_lines(run)[-1] == {
        "step": 4,
        "kind": "end",
        "reason": "2 measurements without a better one (patience)",
    }
    assert best_step(run) == 2
    assert_same_tensors(head_tensors(run), load_file(run / "checkpoints" / "step-000004" / "head" / WEIGHTS))
    assert "ended by 2 measurements without a better one" in write_report(run).read_text()
    before = all_lines(run)
    trainer.run(**keys, resume=True)
    assert all_lines(run) == before
    measure(1.6, 1.5, 1.4)
    trainer.run(**keys | {"patience": 3, "max_steps": 7}, resume=True)
    assert [line["step"] for line in all_lines(run, "acceptance")] == [1, 2, 3, 4, 5, 6, 7]
    assert (best_step(run), all_lines(run, "end")) == (5, [])


def test_count_of_patience_goes_on_where_the_run_does(trainer, measure):
    measure(1.5, 1.4, 1.4)
    keys = KEYS | {"max_steps": 9, "patience": 4}
    with in_step(4, terminate):
        assert trainer.main(**keys) == 128 + signal.SIGTERM
    measure(1.4, 1.4)
    run = trainer.run(**keys, resume=True)
    assert (all_lines(run)[-1]["step"], best_step(run)) == (5, 1)


@pytest.mark.parametrize("lengths", [(1.5, 1.2, 1.2, 1.6, 1.7, 1.3), (1.5, 1.2, 1.6, 1.7, 1.3, 1.4)])
def test_killed_run_goes_on_with_the_best_head_of_its_checkpoint(trainer, measure, tmp_path, lengths):
    """Killed in step 6: what followed the checkpoint of step 2 or 4 is measured again, and may turn out worse."""
    keys, run = KEYS | {"max_steps": 7, "checkpoint_every": 4}, tmp_path / "run"
    measure(*lengths)
    with in_step(6, die), pytest.raises(Killed):
        trainer.main(**keys)
    assert best_step(run) == (5 if lengths[4] == 1.7 else 4)
    measure(1.0, 1.0, 1.0)  # of steps 5, 6 and 7
    trainer.run(**keys, resume=True)
    assert best_step(run) == 4
    weights = load_file(run / "checkpoints" / "step-000004" / "head" / WEIGHTS)
    assert_same_tensors(load_file(run / "best" / WEIGHTS), weights)
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_best_head_that_was_not_written_in_time_is_that_of_the_checkpoint(trainer, measure):
    measure(1.2, 1.5)
    run = trainer.run(**KEYS | {"max_steps": 2})
    before = (run / "best" / "acceptance.json").read_text()
    shutil.rmtree(run / "best")
    measure()
    trainer.run(**KEYS | {"max_steps": 2}, resume=True)
    assert (run / "best" / "acceptance.json").read_text() == before
    weights = load_file(run / "checkpoints" / "step-000002" / "head" / WEIGHTS)
    assert_same_tensors(load_file(run / "best" / WEIGHTS), weights)


def test_run_of_a_version_without_best_heads_keeps_its_last_figure(trainer, measure):
    """Resumed with more steps, where a measurement at the earlier end is not due."""
    measure(1.5)
    keys = KEYS | {"max_steps": 3, "eval_every": 2, "checkpoint_every": 0}
    run = trainer.run(**keys | {"eval_every": 0})
    shutil.rmtree(run / "best")
    write_json(run / "acceptance.json", {"step": 9, "acceptance_length": 9.0})  # of steps that were given up
    before = all_lines(run, "acceptance")
    measure(1.2, 1.3)
    trainer.run(**keys | {"max_steps": 5}, resume=True)
    lines = all_lines(run, "acceptance")
    assert ([line["step"] for line in lines], lines[:1]) == ([3, 4, 5], before)
    assert best_step(run) == 3
    told = json.loads((run / "best" / "acceptance.json").read_text())
    assert told == {"family": "Medusa"} | {name: value for name, value in before[0].items() if name != "kind"}


def test_best_head_of_steps_given_up_is_removed(trainer, measure, tmp_path, capsys):
    measure(1.6, 1.2, 1.2, 1.7, 1.2, 1.2)
    run = trainer.run(**KEYS)
    measure(1.3, 1.2, 1.2, 1.65)
    trainer.run(**KEYS, resume_from=run / "checkpoints" / "step-000002")
    assert "the best head so far, of step 1, is not kept any more" in capsys.readouterr().err
    assert best_step(run) == 6


def test_measured_run_that_is_stopped_has_the_same_best_head(trainer, finished, tmp_path):
    keys = {key: value for key, value in KEYS.items() if key != "eval_every"} | {"eval_every": 2, "eval_tokens": 6}
    whole = finished("medusa", **keys)
    with in_step(5, die), pytest.raises(Killed):
        trainer.main(**keys)
    run = trainer.run(**keys, resume=True)
    assert_same_run(whole, run)
    files = [
        {p.relative_to(one): p.read_bytes() for p in (one / "best").rglob("*") if p.is_file()} for one in (whole, run)
    ]
    assert files[0] == files[1]


def test_patience_without_measurements_is_refused(trainer):
    for keys in ({"eval_prompts": 0, "eval_every": 2}, {"eval_prompts": 2, "eval_every": 0}):
        with pytest.raises(ValueError, match="patience 2 counts measurements, and there are none before the end"):
            trainer.main(data="missing.jsonl", patience=2, **keys)
