"""What reading a head's file gives, and the words for a config.json that says something else than its tensors.

Tensors decide wherever they can. What the config says otherwise, or does not say and had to be assumed, is kept as notes: sentences
for whoever loads the head. This file touches no disk.
"""

from typing import Any, NamedTuple


class Reading(NamedTuple):
    """A file, read by its format's `from_file`."""

    config: Any  # the head's
    state: dict  # its tensors in our names
    format: str  # the layout that the file follows, one of the family's FORMATS
    notes: list  # of str: where config.json lies, is silent, or was overruled by tensors
    embedding_is_targets: bool = False  # whether the file says that its embed_tokens is a copy of the target's


class UnknownVocabulary(ValueError):
    """Neither the tensors nor config.json tell the vocabulary's size: the target that config.json names has it."""


def compare(notes, config, key, found, tensors="the tensors"):
    """Note it if config.json says something else of `key` than what is `found` in `tensors`; saying nothing is no lie."""
    if config.get(key) not in (None, found):
        notes.append(f'config.json says "{key}": {config[key]!r}; by {tensors} it is {found!r}')


def assume(notes, key, value, why):
    """Note that config.json does not say `key`, and what is taken for it."""
    notes.append(f'config.json does not say "{key}": taken as {value!r}, {why}')


def listed(value):
    """The strings of a list in config.json; [] for whatever else stands there."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
