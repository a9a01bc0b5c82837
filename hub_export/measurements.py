"""The figures that were measured on a head, found beside it: for its model card.

Reads acceptance.json, benchmark.json, tree.json and config.yaml of a head folder or of the run it belongs to. A
checkpoint's figures are those of its own step (metrics.jsonl), never the run's final ones. Measures nothing itself.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..heads.checkpoint import TREE_FILE
from ..inference.tree import load_tree
from .tracked_run import find_tracked_run


@dataclass(frozen=True)
class Measurements:
    """What was found; None where there was nothing."""

    acceptance: dict | None = None  # the engine's measurement: acceptance_length, per_position, num_steps, ...
    benchmark: dict | None = None  # {"hardware", "date", "command", "rows": [...]}
    recipe: dict | None = None  # the run's resolved configuration
    step: int | None = None  # of the checkpoint, where the head is one
    tree: Path | None = None  # the draft tree measured for this head
    tracked: dict | None = None  # where W&B has the run


def find_measurements(head_folder):
    """Figures of the head in `head_folder` (as resolve_head gives it).

    Raises ValueError naming a file that is there but broken.
    """
    head_folder = Path(head_folder).resolve()
    run, step = _run_of(head_folder)
    if step is not None:
        acceptance = _read_json(head_folder / "acceptance.json") or _acceptance_at(run / "metrics.jsonl", step)
        benchmark = _read_json(head_folder / "benchmark.json")
    else:
        acceptance = _first(_read_json, head_folder, run, "acceptance.json")
        benchmark = _first(_read_json, head_folder, run, "benchmark.json")
    recipe = _first(_read_yaml, head_folder, run, "config.yaml")
    # A run's tree was measured with its final head.
    places = [head_folder] + ([run] if run is not None and step is None else [])
    tree = next((path for place in places if (path := place / TREE_FILE).is_file()), None)
    if tree is not None:
        load_tree(tree)
    tracked = None if run is None else find_tracked_run(run, is_final=step is None)
    return Measurements(acceptance, benchmark, recipe, step, tree, tracked)


def _run_of(head_folder):
    """(the run's folder or None, the checkpoint's step or None) of a head folder, from runs/<name>/'s layout."""
    parent = head_folder.parent
    if head_folder.name != "head":
        return None, None
    step = re.fullmatch(r"step-(\d+)", parent.name)
    if step and parent.parent.name == "checkpoints":
        return parent.parent.parent, int(step[1])
    return parent, None


def _first(read, head_folder, run, name):
    found = read(head_folder / name)
    return read(run / name) if found is None and run is not None else found


def _read_json(path):
    return _read(path, json.loads)


def _read_yaml(path):
    return _read(path, yaml.safe_load)


def _read(path, parse):
    if not path.is_file():
        return None
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())}): mend it or move it away") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no mapping of names to values: mend it or move it away")
    return content


def _acceptance_at(path, step):
    """The last acceptance line of `step` in a metrics.jsonl, or None."""
    if not path.is_file():
        return None
    found = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not valid JSON ({error}): mend it or move it away") from None
        if entry.get("kind") == "acceptance" and entry.get("step") == step:
            found = entry
    return found
