"""Reading, the result of reading a head's file, and the notes on a config.json that contradicts its tensors.

Tensors decide wherever they can. Notes are sentences for the user who loads the head: what the config says otherwise, or does not
say and had to be assumed. This file touches no disk.
"""

from typing import Any, NamedTuple


class Reading(NamedTuple):
    """A file, read by its format's `from_file`."""

    config: Any  # the head's
    state: dict  # its tensors in our names
    format: str  # the file's layout: one of the family's FORMATS, or one that is only read
    notes: list  # of str: where config.json is wrong or silent, or was overruled by tensors
    embedding_is_targets: bool = False  # whether the file says that its embed_tokens is a copy of the target's


class UnknownVocabulary(ValueError):
    """Neither the tensors nor config.json tell the vocabulary's size; the target that config.json names does."""


def compare(notes, config, key, found, tensors="the tensors"):
    """Add a note if config.json has another value of `key` than the value `found` in `tensors`. A missing key gives no note."""
    if config.get(key) not in (None, found):
        notes.append(f'config.json says "{key}": {config[key]!r}; by {tensors} it is {found!r}')


def assume(notes, key, value, why):
    """Add a note that config.json lacks `key`, with the value that is assumed."""
    notes.append(f'config.json does not say "{key}": taken as {value!r}, {why}')


def listed(value):
    """The strings of a list in config.json; [] for any other value."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
