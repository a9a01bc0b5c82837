"""Steps whose loss or gradient is not finite: left out, counted and written down, or the end of the run."""

import json
import math
import shutil
import signal
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headstart.tests.train.tiny_runs import (
    all_lines,
    assert_same_run,
    assert_same_tensors,
    head_tensors,
    in_step,
    optimizer_state,
    terminate,
)
from headstart.tests.train.trainings import HEADS, RESUMABLE
from headstart.train.run import loop
from headstart.train.run.optimization import NonFiniteLoss, build_optimizer, finish_step

DIVERGING = {"lr": 1e38, "warmup_ratio": 0, "max_grad_norm": 0}


@contextmanager
def poisoned(*steps, what="loss"):
    """Within the block the loss, or the gradient, of these steps is not finite. what "nothing": no weight moves in them."""
    numbers, finish = count(1), loop.finish_step

    def act(trained, optimizer, shares, **named):
        if next(numbers) in steps:
            if what == "nothing":
                optimizer.zero_grad()
                return sum(shares), 1.0
            if what == "loss":
                shares[-1][0, 0] = math.nan
            else:
                next(p for p in trained.parameters() if p.grad is not None).grad.fill_(math.inf)
        return finish(trained, optimizer, shares, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "finish_step", act)
        yield


def written(run):
    return [json.loads(line) for line in (run / "non-finite-steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", HEADS)
def test_run_stops_before_the_step_and_says_what_was_fed(trainers, read_metrics, tmp_path, capsys, family):
    with pytest.raises(NonFiniteLoss, match=r"step 2 is not finite \(.*/non-finite-steps\.jsonl says .* no such step"):
        trainers[family].main(**DIVERGING, accumulate=2)
    assert [line["step"] for line in read_metrics()] == [1]
    assert not (tmp_path / "run" / "head").exists()
    (one,) = written(tmp_path / "run")
    (micro_steps,) = one["ranks"]
    assert (one["step"], [len(micro_step["rows"]) for micro_step in micro_steps]) == (2, [2, 2])
    texts = [text for micro_step in micro_steps for text in micro_step["texts"]]
    assert texts
    assert all(text.startswith("<|user|>") and "w" in text for text in texts)
    if one["not_finite"] == "loss":
        assert any(isinstance(loss, str) for micro_step in micro_steps for loss in micro_step["losses"])
    assert texts[0][:30] not in capsys.readouterr().err


def test_it_ends_the_command_with_a_message_and_a_status(arguments, run_script):
    status, said = run_script(arguments(**DIVERGING))
    assert status == 1
    assert "error: the loss of step 2 is not finite" in said


@pytest.mark.parametrize(
    ("training", "what"), [("medusa", "loss"), ("eagle3", "loss"), ("eagle", "gradient"), ("joint", "gradient")]
)
def test_step_left_out_moves_nothing_but_data_and_schedule(trainers, tmp_path, training, what):
    """All figures, weights and moments are those of a run whose optimiser stood still in that step."""
    keys = {"accumulate": 2, "max_steps": 5, "max_skipped_steps": 1}
    with poisoned(3, what="nothing"):
        expected = trainers[training].run(**keys, output=tmp_path / "expected")
    with poisoned(3, what=what):
        run = trainers[training].run(**keys)
    assert_same_tensors(head_tensors(run), head_tensors(expected))
    states = [optimizer_state(folder)["state"] for folder in (run, expected)]
    for index, moments in states[0].items():
        assert_same_tensors(moments, states[1][index])
    lines = [line for line in all_lines(expected) if line["step"] != 3]
    assert all_lines(run) == [line | {"skipped_steps": int(line["step"] > 3)} for line in lines]
    (one,) = written(run)
    assert (one["step"], one["not_finite"]) == (3, what)
    assert [bool(micro_step["texts"]) for micro_step in one["ranks"][0]] == [what == "gradient", True]
    with poisoned(3, what=what), pytest.raises(NonFiniteLoss):  # as without the key
        trainers[training].main(**keys | {"max_skipped_steps": 0}, output=tmp_path / "stopped")


def test_count_goes_on_in_a_resumed_run_and_limits_it(trainer, tmp_path):
    keys, run = RESUMABLE | {"max_skipped_steps": 1}, tmp_path / "run"
    with poisoned(3):
        whole = trainer.run(**keys, output=tmp_path / "whole")
    with in_step(4, terminate), poisoned(3):
        assert trainer.main(**keys) == 128 + signal.SIGTERM
    shutil.copytree(run, tmp_path / "again")
    assert_same_run(whole, trainer.run(**keys, resume=True))
    assert written(run) == written(whole)
    with poisoned(1), pytest.raises(NonFiniteLoss, match=r"step 5 .* max_skipped_steps 1 .* no more"):
        trainer.main(**keys, resume=True, output=tmp_path / "again")
    with poisoned(1):  # step 5
        trainer.run(**keys | {"max_skipped_steps": 2}, resume=True, output=tmp_path / "again")
    assert [one["step"] for one in written(tmp_path / "again")] == [3, 5]


def test_run_taken_back_before_the_step_forgets_it(trainer, finished, tmp_path):
    with poisoned(3):
        run = trainer.run(**RESUMABLE, max_skipped_steps=1)
    trainer.run(**RESUMABLE, resume_from=run / "checkpoints" / "step-000002")
    assert_same_run(finished("medusa", **RESUMABLE), run)
    assert written(run) == []


def step_with_a_bad_rank(rank, world, what):
    """On one rank: a step in which rank 1 alone has a number that is not finite."""
    head = nn.Linear(3, 3)
    nn.init.ones_(head.weight)
    nn.init.ones_(head.bias)
    optimizer = build_optimizer(head, 0.1, 0.9, 0.95)
    for parameter in head.parameters():
        parameter.grad.fill_(math.inf if what == "gradient" and rank else 1.0)
    shares = [torch.full((2, 5), math.nan if what == "loss" and rank else 1.0, dtype=torch.float64)]

    def reduce(tensor, how):
        dist.all_reduce(tensor)
        return tensor

    accelerator = SimpleNamespace(reduce=reduce, num_processes=world)
    with pytest.raises(NonFiniteLoss) as found:
        finish_step(head, optimizer, shares, accelerator=accelerator, lr=0.1, max_norm=1.0)
    assert found.value.what == what
    assert found.value.micro_steps == ([0] if rank or what == "gradient" else [])
    assert all((parameter == 1).all() for parameter in head.parameters())


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_all_ranks_leave_a_step_out_because_of_one(assert_on_ranks, what):
    assert_on_ranks(2, step_with_a_bad_rank, what)
