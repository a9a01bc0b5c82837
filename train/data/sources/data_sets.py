"""The data sets of a run, with their weights: how `data` spells them.

data_sets("a.jsonl:0.7,OWNER/NAME:train_sft:0.3")     # [DataSet("a.jsonl", 0.7), DataSet("OWNER/NAME:train_sft", 0.3)]
"""

import glob
import math
import re
from dataclasses import dataclass
from pathlib import Path

from .records import is_pattern

_WEIGHT = re.compile(r"-?\d*\.?\d+(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class DataSet:
    """name: one set, as load_conversations takes it; weight: its share of the rows, before all are divided by their sum, or None"""

    name: str
    weight: float | None


def data_sets(data: str) -> list[DataSet]:
    """The sets that `data` names, separated by commas, all with a weight after a last colon or all without.

    The name of a file, or a pattern that files match, is one set whatever is in it. Raises ValueError for an empty name, a set
    named twice, a weight that is not positive, and weights of some sets only.
    """
    if "," not in data or Path(data).expanduser().exists() or _matches(data):
        return [DataSet(data, None)]
    sets = [_data_set(part.strip()) for part in data.split(",")]
    names = [one.name for one in sets]
    if not all(names):
        raise ValueError(f"data {data!r} names an empty set: leave out the comma that is too much")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"data {data!r} names {twice} twice: name it once, with a larger weight")
    unweighted = [one.name for one in sets if one.weight is None]
    if unweighted and len(unweighted) < len(sets):
        raise ValueError(
            f"data {data!r} gives {unweighted[0]} no weight: give all sets one, as {unweighted[0]}:0.5, or none"
        )
    for one in sets:
        if one.weight is not None and not (one.weight > 0 and math.isfinite(one.weight)):
            raise ValueError(
                f"the weight of {one.name} must be more than 0, got {one.weight:g}: leave the set out, or give it one"
            )
    return sets


def _data_set(text):
    name, colon, weight = text.rpartition(":")
    if colon and _WEIGHT.fullmatch(weight) and not Path(text).expanduser().exists():
        return DataSet(name, float(weight))
    return DataSet(text, None)


def _matches(data):
    return is_pattern(data) and bool(glob.glob(str(Path(data).expanduser()), recursive=True))
