"""One self-contained HTML page about a training run: `headstart report runs/NAME` writes runs/NAME/report.html.

It shows what the run folder holds and nothing else: training curves and acceptance (metrics.jsonl, acceptance.json), the draft
tree (tree.json), the speed table (benchmark.json), sample generations and the resolved configuration (config.yaml).
Whatever is missing is named in its section together with what makes it. The page loads nothing from outside.

It does not run a model and does not measure anything: every figure was written by the tool that measured it.
"""

import json
import os
from pathlib import Path

from .report_page import render_page
from .report_sections import (
    acceptance_section,
    choice_section,
    config_section,
    rates_section,
    samples_section,
    speed_section,
    tiles,
    training_section,
    tree_section,
)


def write_report(run, output=None):
    """Write the report of the run folder `run` and return its path.

    output: where to write it; `report.html` in the run folder by default, replaced if it is there.
    Raises ValueError where `run` is no run folder, or a file in it cannot be read (naming the file, and the line if there is one).
    """
    run = Path(run)
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder: give the folder of a training run, such as runs/quickstart")
    output = run / "report.html" if output is None else Path(output)
    if output.is_dir():
        raise ValueError(f"{output} is a folder: give the name of the HTML file to write")
    config = _read_text(run / "config.yaml")
    train, measured = _read_metrics(run / "metrics.jsonl")
    acceptance = _read_json(run / "acceptance.json", ("acceptance_length",))
    tree = _read_json(run / "tree.json", ())
    if tree is not None and "dynamic" in tree:
        _require(tree["dynamic"], ("max_depth", "width", "num_nodes"), f"{run / 'tree.json'}, dynamic")
    elif tree is not None:
        _require(tree, ("parents", "ranks"), run / "tree.json")
    benchmark = _read_json(run / "benchmark.json", ("rows",))
    for row in (benchmark or {}).get("rows", []):
        _require(row, ("head", "temperature", "draft"), f"{run / 'benchmark.json'}, one of its rows")
    if config is None and not (train or measured or acceptance or tree or benchmark):
        raise ValueError(
            f"{run} holds none of config.yaml, metrics.jsonl, acceptance.json, tree.json, benchmark.json: "
            "give the folder that a training run wrote"
        )
    page = render_page(
        run.resolve().name,
        tiles(run, train, measured, acceptance, tree, benchmark),
        [
            ("Acceptance while training", acceptance_section(measured)),
            ("Training", training_section(train)),
            ("Acceptance by depth and rank", rates_section(acceptance, tree)),
            ("The draft tree", tree_section(tree, acceptance, run)),
            ("Why this tree", choice_section(tree, run)),
            ("Speed", speed_section(benchmark, run)),
            ("Samples", samples_section(acceptance)),
            ("Configuration", config_section(config)),
        ],
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(page, encoding="utf-8")
        os.replace(aside, output)
    finally:
        aside.unlink(missing_ok=True)
    return output


def _read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _read_json(path, required):
    text = _read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg}); make it again or remove it") from error
    return _require(value, required, path)


def _require(value, keys, where):
    found = sorted(value) if isinstance(value, dict) else type(value).__name__
    if not isinstance(value, dict) or any(key not in value for key in keys):
        raise ValueError(
            f"{where}: expected an object with {', '.join(keys)}, found {found}; make it again or remove it"
        )
    return value


def _read_metrics(path):
    """The training and the acceptance lines by step; of a step written twice (by a resumed run) the later line counts."""
    by_kind = {"train": {}, "acceptance": {}}
    lines = (_read_text(path) or "").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = _require(json.loads(line), ("step", "kind"), where)
        except json.JSONDecodeError as error:
            if number == len(lines):
                continue  # no newline at its end: a running training is just writing it
            raise ValueError(f"{where}: not JSON ({error.msg}): {line[:80]!r}") from error
        if record["kind"] == "acceptance":
            _require(record, ("acceptance_length", "per_position"), where)
        by_kind.get(record["kind"], {})[record["step"]] = record
    return tuple([by_kind[kind][step] for step in sorted(by_kind[kind])] for kind in ("train", "acceptance"))
