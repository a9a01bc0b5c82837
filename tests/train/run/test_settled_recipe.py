"""What a run decides at its start, it keeps: the date that a chat template prints, and the rules by which data become labels."""

import json
import signal
from datetime import date as real_date, datetime as real_datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers.utils import chat_template_utils

from headstart.tests.train.conftest import CHAT_TEMPLATE, save_target, small_llama, word_tokenizer
from headstart.tests.train.tiny_runs import all_lines, assert_same_run, in_step, terminate
from headstart.train.medusa import Recipe
from headstart.train.run import settled_recipe
from headstart.train.run.checkpointing import list_checkpoints, read_state
from headstart.train.run.settled_recipe import settle_recipe

DATED = "w{{ strftime_now('%d') | int }} " + CHAT_TEMPLATE


@pytest.fixture
def on_day(monkeypatch):
    """on_day("2026-11-23"): it is that day from here on."""

    def on_day(day):
        class Day(real_date):
            today = classmethod(lambda cls: real_date.fromisoformat(day))

        class Moment(real_datetime):
            now = classmethod(lambda cls, zone=None: real_datetime.fromisoformat(day))

        monkeypatch.setattr(settled_recipe, "date", Day)
        monkeypatch.setattr(chat_template_utils, "datetime", Moment)

    return on_day


@pytest.fixture
def dated_target(tmp_path):
    """Folder of a target whose chat template prints the day of the month."""
    folder = save_target(tmp_path / "dated", small_llama(0.3))
    tokenizer = word_tokenizer()
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(folder)
    return folder


KEYS = {"checkpoint_every": 2, "max_steps": 6}


def test_run_on_a_dated_template_goes_on_the_next_day(trainer, dated_target, on_day, tmp_path):
    keys = KEYS | {"target": dated_target}
    on_day("2026-11-23")
    whole = trainer.run(**keys, output=tmp_path / "whole")
    with in_step(3, terminate):
        assert trainer.main(**keys) == 128 + signal.SIGTERM
    on_day("2026-11-24")
    assert_same_run(whole, trainer.run(**keys, resume=True))
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["template_date"] == "2026-11-23"
    other = trainer.run(**keys, output=tmp_path / "other")
    assert all_lines(other) != all_lines(whole)  # the date is in the rows
    given = trainer.run(**keys, output=tmp_path / "given", template_date="2026-11-23")
    assert_same_run(whole, given)


def test_date_is_kept_only_where_a_template_prints_it(trainer, on_day):
    on_day("2026-11-23")
    config = yaml.safe_load((trainer.run(max_steps=1) / "config.yaml").read_text())
    assert (config["template_date"], config["data_rules"]) == ("", 2)


def forget_keys(run):
    """Make of a run one that was begun before there were the keys."""
    for checkpoint in list_checkpoints(run):
        state = read_state(checkpoint)
        state["recipe"] = {k: v for k, v in state["recipe"].items() if k not in ("data_rules", "template_date")}
        (checkpoint / "state.json").write_text(json.dumps(state))


def test_run_begun_before_there_were_rules_keeps_its_labels(trainer, monkeypatch, tmp_path):
    """Its data have answers of weight 0, which were supervised then. It is resumed twice."""
    turns = [json.loads(line)["messages"] for line in Path(trainer.given["data"]).read_text().splitlines()]
    for one in turns[::2]:
        one += [{**one[0]}, {**one[1], "weight": 0}]
    data = tmp_path / "weighted.jsonl"
    data.write_text("\n".join(json.dumps({"messages": one}) for one in turns))
    keys = KEYS | {"data": data}
    with monkeypatch.context() as before:
        before.setattr(settled_recipe, "_RULES", 0)
        whole = trainer.run(**keys, output=tmp_path / "whole")
        with in_step(3, terminate):
            assert trainer.main(**keys) == 128 + signal.SIGTERM
    forget_keys(tmp_path / "run")
    with in_step(2, terminate):
        assert trainer.main(**keys, resume=True) == 128 + signal.SIGTERM
    assert_same_run(whole, trainer.run(**keys, resume=True))
    new = trainer.run(**keys, output=tmp_path / "new")
    assert all_lines(new) != all_lines(whole)


def test_run_begun_before_dates_were_kept_goes_on_with_the_date_of_its_start(trainer, dated_target, on_day, tmp_path):
    keys = KEYS | {"target": dated_target}
    on_day("2026-11-23")
    whole = trainer.run(**keys, output=tmp_path / "whole")
    with in_step(3, terminate):
        assert trainer.main(**keys) == 128 + signal.SIGTERM
    forget_keys(tmp_path / "run")
    on_day("2026-11-24")
    with pytest.raises(ValueError, match="the data gives other rows"):
        trainer.run(**keys, resume=True)
    assert_same_run(whole, trainer.run(**keys, resume=True, template_date="2026-11-23"))


def settle(recipe, *, resumed=None, template=DATED):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    settled = settle_recipe(recipe, SimpleNamespace(resumed=resumed), tokenizer)
    return settled.data_rules, settled.template_date, str(tokenizer.chat_template)


def test_run_stopped_before_its_first_checkpoint_keeps_its_config(on_day, tmp_path):
    on_day("2026-11-24")
    recipe = Recipe(target="t", data="d", output=str(tmp_path), resume=True)
    assert settle(recipe)[:2] == (2, "2026-11-24")
    (tmp_path / "config.yaml").write_text("template_date: '2026-11-20'\ndata_rules: 1\n")
    assert settle(recipe)[:2] == (1, "2026-11-20")
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert settle(recipe) == (0, "", DATED)


def test_dates_of_all_forms_of_the_call_are_fixed():
    recipe = Recipe(target="t", data="d", output="new", template_date="2026-07-04")
    template = """{% set a = strftime_now("%d %b %Y") %}{{ a }} {{ strftime_now( '%Y-%m-%d' ) }}{{ strftime_now is defined }}"""
    settled = settle(recipe, template=template)[2]
    assert settled == "{% set a = '04 Jul 2026' %}{{ a }} {{ '2026-07-04' }}{{ strftime_now is defined }}"
    with pytest.raises(ValueError, match="a format that it computes"):
        settle(recipe, template="{{ strftime_now(form) }}")


def test_date_of_another_form_is_refused():
    with pytest.raises(ValueError, match="template_date must be a date as 2026-12-31, got '4 July'"):
        Recipe(target="t", data="d", output="new", template_date="4 July")
