"""Read and check the files of a run folder for the report; None or an empty list stands for a missing file."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFiles:
    """The content of a run folder.

    path: its folder; config: the text of config.yaml; train, measured, ended: lines of metrics.jsonl, by step; acceptance, tree,
    benchmark: acceptance.json, tree.json, benchmark.json
    """

    path: Path
    config: str | None
    train: list
    measured: list
    ended: list
    acceptance: dict | None
    tree: dict | None
    benchmark: dict | None

    @property
    def name(self):
        return self.path.resolve().name

    @property
    def rates(self):
        """The trainer's last measurement of acceptance per depth and rank, or None."""
        rates = (self.acceptance or {}).get("rates")
        return rates if rates and any(rates) else None


def read_run(path):
    """RunFiles of the folder `path`.

    Raises ValueError if it is not a run folder, or if a file in it cannot be read (naming the file and, if known, the line).
    """
    run = Path(path)
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder: give the folder of a training run, such as runs/quickstart")
    config = _read_text(run / "config.yaml")
    train, measured, ended = _read_metrics(run / "metrics.jsonl")
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
    return RunFiles(run, config, train, measured, ended, acceptance, tree, benchmark)


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
    """The lines of training, acceptance and an early end, by step. If a resumed run wrote a step twice, the later line counts."""
    by_kind = {"train": {}, "acceptance": {}, "end": {}}
    lines = (_read_text(path) or "").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = _require(json.loads(line), ("step", "kind"), where)
        except json.JSONDecodeError as error:
            if number == len(lines):
                continue  # no newline at its end: a running training is still writing it
            raise ValueError(f"{where}: not JSON ({error.msg}): {line[:80]!r}") from error
        if record["kind"] == "acceptance":
            _require(record, ("acceptance_length", "per_position"), where)
        by_kind.get(record["kind"], {})[record["step"]] = record
    return tuple([by_kind[kind][step] for step in sorted(by_kind[kind])] for kind in by_kind)
