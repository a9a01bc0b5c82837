"""Find the figures measured on a head, in the files beside it, and its W&B run: for the model card.

Reads acceptance.json, benchmark.json, tree.json, config.yaml, metrics.jsonl and wandb.json of a head folder or of its run, and
replay.json of an earlier export. A checkpoint's figures are those of its own step, never the run's final ones. The files may come
from anybody, so their types are checked here, once. Measures nothing.
"""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Required, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

import yaml
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HTTPError

from ..heads.checkpoint import BEST, TREE_FILE
from ..heads.storage.hub_answer import hub_options
from ..heads.storage.hub_id import split_revision
from ..inference.speculation.tree import load_tree

REPLAY_FILE, REPLAY_VERSION = "replay.json", 1  # of an export: hub_export/replay_file.py
TRACKED_FILE = "wandb.json"  # in a run: {"run": address, or id if offline; "offline": true, "artifact": full name}


class SetFigure(TypedDict, total=False):
    """The figure of a named set of prompts; from the engine also its turns (first, later) and temperature."""

    set: Required[str]
    turns: str
    temperature: float
    num_prompts: int
    acceptance_length: Required[float]


class Acceptance(TypedDict, total=False):
    """An acceptance figure (hub_export/acceptance.py)."""

    temperature: float
    acceptance_length: Required[float]
    per_position: Required[list[float]]
    num_steps: int
    source: str
    prompts: str
    num_prompts: int
    max_tokens: int
    dtype: str
    hardware: str
    date: str
    by_request: list[list[int]]
    rates: list[list[float]]
    sets: list[SetFigure]


class StoredAcceptance(Acceptance):
    temperature: float


ROW = dict.fromkeys(("temperature", "num_nodes", "acceptance_length", "tokens_per_second", "speedup"), float)
Row = TypedDict("Row", ROW, total=False)


class Benchmark(TypedDict, total=False):
    hardware: str
    date: str
    command: str
    rows: list[Row]


class Choice(TypedDict):
    batch_size: int
    hardware: str
    dtype: str


class TreeFile(TypedDict, total=False):
    rates: list[list[float]]
    expected_acceptance_length: float
    choice: Choice


class OriginRecord(TypedDict, total=False):
    """`record` of an Origin (hub_export/provenance.py)."""

    name: Required[str]
    revision: str
    on_hub: Required[bool]
    again: bool


class MetricsLine(TypedDict, total=False):
    step: Required[int]
    kind: str
    loss: float


class Replay(TypedDict, total=False):
    """The keys of replay.json that an export of the export reads."""

    acceptance: list[StoredAcceptance]
    prompts: list[list[int]]
    rates: list[list[float]]
    benchmark: Benchmark
    recipe: dict
    step: int
    origin: OriginRecord


class Verified(Replay, total=False):
    """The keys of replay.json that `heads.export verify` reads."""

    acceptance: Required[list[StoredAcceptance]]
    files: Required[dict]
    config: Required[dict]
    tensors: Required[dict]
    drawn: Required[list[dict]]
    target: dict


TYPES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", dict: "an object"}
TYPES |= {list: "a list"}


def check_type(value, kind, where, place=""):
    """ValueError, naming the place in the file `where`, if a value does not have the type `kind`. None counts as absent.

    kind: one of TYPES, list[kind] or a TypedDict; further keys of a dict are not checked.
    """
    plain = dict if is_typeddict(kind) else get_origin(kind) or kind
    if not isinstance(value, (int, float) if plain is float else plain):
        raise ValueError(
            f"{where}: {place.strip('.')} should be {TYPES[plain]}, found {value!r:.60}: mend it or move it away"
        )
    if plain is list:
        for i, one in enumerate(value):
            check_type(one, get_args(kind)[0], where, f"{place}[{i}]")
    elif is_typeddict(kind):
        for name, inside in get_type_hints(kind).items():
            if value.get(name) is not None or name in kind.__required_keys__:
                check_type(value.get(name), inside, where, f"{place}.{name}")


@dataclass(frozen=True)
class Measurements:
    """The figures found; a field is None or empty if there are none."""

    acceptance: tuple = ()  # figures of hub_export/acceptance.py, one per temperature
    prompts: list | None = None  # token ids of the prompts that an earlier export measured on
    rates: list | None = None  # acceptance per depth and rank
    benchmark: dict | None = None  # {"hardware", "date", "command", "rows": [...]}
    recipe: dict | None = None  # the run's resolved configuration
    step: int | None = None  # of the checkpoint, if the head is a checkpoint's, or of a run's best head
    is_best: bool = False  # whether it is a run's best head
    tree: Path | None = None  # the draft tree measured for this head
    training: tuple = ()  # lines of metrics.jsonl, up to the checkpoint's step
    tracked: dict | None = None  # W&B's addresses of the run
    origin: dict | None = None  # where the head came from, as an earlier export recorded it: OriginRecord

    @property
    def tree_content(self):
        """tree.json as a dict; {} if there is none."""
        return {} if self.tree is None else json.loads(self.tree.read_text(encoding="utf-8"))


def find_measurements(head_folder, source=None):
    """Figures of the head in `head_folder` (as resolve_head gives it).

    source: the name it was resolved from; for a Hub id replay.json is fetched too, if the repository has one.
    Raises ValueError naming a broken file.
    """
    if source is not None and not Path(source).is_dir():
        with contextlib.suppress(OSError, ValueError, HTTPError):  # most heads on the Hub have none
            repo_id, commit = split_revision(source)[0], Path(head_folder).name
            hf_hub_download(repo_id, REPLAY_FILE, revision=commit, **hub_options(source))
    head_folder = Path(head_folder).resolve()
    run, step = _run_of(head_folder)
    is_best = run is not None and head_folder.name == BEST
    training = _read_lines(run / "metrics.jsonl") if run is not None else []
    if step is not None:
        training = [line for line in training if line.get("step", 0) <= step]
        at_step = [line for line in training if line.get("kind") == "acceptance" and line["step"] == step]
        acceptance = _read(head_folder / "acceptance.json") or (at_step or [None])[-1]
        benchmark = _first(head_folder, run if is_best else None, "benchmark.json")
    else:
        acceptance = _first(head_folder, run, "acceptance.json")
        benchmark = _first(head_folder, run, "benchmark.json")
    recipe = _first(head_folder, run, "config.yaml")
    # A run's tree was measured with its best head, or its final one if there is no other.
    places = [head_folder] + ([run] if run is not None and (step is None or is_best) else [])
    tree = next((path for place in places if (path := place / TREE_FILE).is_file()), None)
    if tree is not None:
        load_tree(tree)
        check_type(json.loads(tree.read_text(encoding="utf-8")), TreeFile, tree)
    if acceptance:
        check_type(acceptance, Acceptance, f"the measured acceptance of {head_folder}")
    if benchmark:
        check_type(benchmark, Benchmark, f"the benchmark.json of {head_folder}")
    earlier = _read(head_folder / REPLAY_FILE) or {}
    if earlier.get("version") != REPLAY_VERSION:
        earlier = {}
    check_type(earlier, Replay, head_folder / REPLAY_FILE)
    figures = (_figure(acceptance, recipe or {}),) if acceptance else tuple(earlier.get("acceptance") or ())
    return Measurements(
        acceptance=figures,
        prompts=earlier.get("prompts") if not acceptance else None,
        rates=(acceptance or earlier).get("rates"),
        benchmark=_public_benchmark(benchmark, run or head_folder) if benchmark else earlier.get("benchmark"),
        recipe=_public_recipe(recipe) if recipe else earlier.get("recipe"),
        step=earlier.get("step") if step is None else step,
        is_best=is_best,
        tree=tree,
        training=tuple(training),
        tracked=None if run is None else find_tracked_run(run, is_final=step is None),
        origin=earlier.get("origin"),
    )


def _public_recipe(recipe):
    """The recipe without paths of the training machine: they tell a reader nothing, or too much."""
    return {key: _public(value) for key, value in recipe.items() if not str(value).startswith(("/", "~", "\\"))}


def _public_benchmark(benchmark, place):
    """The benchmark's rows of plain decoding and of the head in `place`, with absolute paths cut; None if no row is left.

    A benchmark may compare several heads. If no head lies in `place` (it was moved), the only head counts as this head; if there
    are several, none does.
    """
    heads = {str(row.get("head", "-")) for row in (benchmark.get("rows") or ())} - {"none"}
    own = {head for head in heads if Path(head).resolve().is_relative_to(place.resolve())}
    kept = own or (heads if len(heads) == 1 else set())
    if heads and not kept:
        return None
    rows = []
    for row in benchmark.get("rows") or ():
        head = str(row.get("head", "-"))
        if head in kept or head == "none":
            path = Path(head)
            name = place.name if head in own else path.parent.name if path.name == "head" else path.name
            rows.append(row | {"head": name})
    return _public(benchmark | {"command": str(benchmark.get("command", "headstart bench")), "rows": rows})


# An absolute path where a word begins, also after --head= or in a list: /x, ~/x, file:///x, C:\x, \\x; not https://x or a / b.
_ROOT = r"(?:file://)?(?:/(?!/)|(?<!:)//|~[\w.-]*/|[A-Za-z]:[\\/]|\\\\)"
_PATH = re.compile(rf"""(?<='){_ROOT}[^']+|(?<="){_ROOT}[^"]+|(?<![^\s=,:;(\[{{<|@`]){_ROOT}[^\s,;"'`]+""")


def _public(value):
    """A value with every absolute path in it cut to its last part. A string that begins like a path is a path as a whole."""
    if isinstance(value, str):
        return _last_part(value) if re.match(_ROOT, value) else _PATH.sub(lambda found: _last_part(found[0]), value)
    if isinstance(value, dict):
        return {_public(key): _public(one) for key, one in value.items()}
    return [_public(one) for one in value] if isinstance(value, list | tuple) else value


def _last_part(path):
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _figure(acceptance, recipe):
    """The trainer's measurement as an acceptance figure. The trainer decodes greedily."""
    kept = ("acceptance_length", "per_position", "num_steps", "sets")
    figure = {"temperature": 0.0} | {name: acceptance[name] for name in kept if name in acceptance}
    figure |= {"source": acceptance.get("source", "engine"), "prompts": "held-out prompts of the training run"}
    sets = acceptance.get("sets") or []
    greedy = [one for one in sets if one.get("turns", "first") == "first" and not one.get("temperature")]
    num_prompts = sum(one.get("num_prompts", 0) for one in greedy) or recipe.get("eval_prompts")
    sizes = {"num_prompts": num_prompts, "max_tokens": recipe.get("eval_tokens")}
    return (
        {"per_position": []}
        | figure
        | {name: value for name, value in sizes.items() if isinstance(value, int) and value}
    )


def _run_of(head_folder):
    """(the run's folder or None, the step or None for a final head) of a head folder, by the layout of runs/<name>/."""
    parent = head_folder.parent
    if head_folder.name == BEST and (told := _read(head_folder / "acceptance.json")) and "step" in told:
        return parent, told["step"]
    if head_folder.name != "head":
        return None, None
    step = re.fullmatch(r"step-(\d+)", parent.name)
    if step and parent.parent.name == "checkpoints":
        return parent.parent.parent, int(step[1])
    return parent, None


def _first(head_folder, run, name):
    found = _read(head_folder / name)
    return _read(run / name) if found is None and run is not None else found


def _read(path):
    """A .json or .yaml file as a dict; None if there is none."""
    if not path.is_file():
        return None
    parse = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())}): mend it or move it away") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no mapping of names to values: mend it or move it away")
    return content


def _read_lines(path):
    """The lines of a metrics.jsonl; [] if there is none."""
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not valid JSON ({error}): mend it or move it away") from None
        check_type(found[-1], MetricsLine, f"{path}, line {number}")
    return found


def find_tracked_run(run, is_final):
    """wandb.json of a run folder as a dict; None if there is none.  is_final: False, for a checkpoint, drops the head's artifact.

    Raises ValueError naming the file if it is broken.
    """
    path = Path(run, TRACKED_FILE)
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: told[key] for key in ("run", "offline", "artifact") if key in told and (is_final or key != "artifact")
        }
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): mend it or move it away") from None
