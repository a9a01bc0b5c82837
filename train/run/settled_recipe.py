"""Choices that a run makes at its start and keeps when it is resumed: the rules for its data, the date of its chat template."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import yaml
from accelerate.utils import broadcast_object_list

from ..data.template_date import prints_date, set_date
from .checkpointing import read_state

_RULES = 2  # of new runs
_UNKNOWN = {"data_rules": 0, "template_date": ""}  # of runs begun before there were such keys


def settle_recipe(recipe, processes, tokenizer):
    """The recipe with `data_rules` and `template_date`, and the tokenizer's chat template, changed in place, with that date.

    A new run takes the newest rules and, if the template prints it, today's date. A resumed run keeps its own: rules 0 and no date
    if it was begun before there were such keys. Then the template prints today's date, unless the recipe names another.
    """
    begun = _begun_with(recipe, processes.resumed)
    if begun is None:
        today = date.today().isoformat() if prints_date(tokenizer) else ""
        begun = {"data_rules": _RULES, "template_date": today}
    chosen = {name: getattr(recipe, name) or begun.get(name, empty) for name, empty in _UNKNOWN.items()}
    (chosen,) = broadcast_object_list([chosen])  # the ranks may see midnight between them
    if chosen["template_date"] and prints_date(tokenizer):
        set_date(tokenizer, chosen["template_date"])
    return replace(recipe, **chosen)


def _begun_with(recipe, resumed):
    """The recipe with which the run was begun, as a dict; None for a new run."""
    if resumed:
        return read_state(resumed)["recipe"]
    config = Path(recipe.output, "config.yaml")
    if recipe.resume and config.is_file():  # stopped before its first checkpoint
        return yaml.safe_load(config.read_text(encoding="utf-8"))
    return None
