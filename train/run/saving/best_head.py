"""best/ of a run: the head that was measured best, beside the newest checkpoint.

    runs/<name>/best/    the head's files, as in head/, and acceptance.json: what was measured on it, with its step

The longest acceptance length on held-out prompts decides; of equal ones, the lower held-out loss. Only figures of the same prompts
and of the same source are compared: where these change, the next measurement is the best. What counts are the lines of
metrics.jsonl: a run that goes on from a checkpoint drops those after it, and has the best head of those that are left. So the best
head of the newest checkpoint is kept, as .best.kept, until a checkpoint follows the better one that took its place.
"""

import json
import math
import shutil
from itertools import takewhile
from pathlib import Path

from ....evaluation.acceptance_lines import difference
from ....heads.checkpoint import BEST
from ....heads.storage.atomic_write import write_json

KEPT, FRESH, GONE = ".best.kept", ".best.new", ".best.gone"


def best_measurement(lines):
    """(the best acceptance line of metrics.jsonl, the number of measurements since); (None, 0) without one.

    What counts are the last one and those before it that compare with it, up to the first that does not.
    """
    measured = [line for line in lines if line["kind"] == "acceptance"]
    if not measured:
        return None, 0
    alike = list(takewhile(lambda line: not difference(line, measured[-1]), reversed(measured)))[::-1]
    best = max(range(len(alike)), key=lambda i: (*_merit(alike[i]), -i))
    return alike[best], len(alike) - 1 - best


def is_measured(lines, step, meter):
    """Whether metrics.jsonl has what `meter` would measure after this step, or a figure of another source."""
    now = {"source": meter.source, "measured_on": meter.measured_on}
    last = [line for line in lines if (line["kind"], line["step"]) == ("acceptance", step)][-1:]
    return any(line["source"] != meter.source or not difference(line, now) for line in last)


def _merit(line):
    loss = line.get("head_loss", math.inf)  # lines of older versions have none
    return line["acceptance_length"], -loss if math.isfinite(loss) else -math.inf


def write_best(run, write, told):
    """Put a head into best/, whole or not at all.  write(folder): writes its files into a new folder; told: for acceptance.json"""
    run = Path(run)
    shutil.rmtree(run / FRESH, ignore_errors=True)
    write(run / FRESH)
    write_json(run / FRESH / "acceptance.json", told)
    if (run / KEPT).exists():
        _remove(run, BEST)
    elif (run / BEST).exists():
        (run / BEST).rename(run / KEPT)
    (run / FRESH).rename(run / BEST)


def forget_kept(run):
    """Remove the best head of an earlier checkpoint: a newer checkpoint is whole."""
    _remove(Path(run), KEPT)


def restore_best(run, step):
    """Make best/ the head of `step` (None: of no step), and remove all others. Returns whether it is there."""
    run = Path(run)
    found = next((name for name in (BEST, KEPT, FRESH) if step is not None and _step_of(run / name) == step), None)
    for name in (BEST, KEPT, FRESH):
        if name != found:
            _remove(run, name)
    shutil.rmtree(run / GONE, ignore_errors=True)
    if found not in (None, BEST):
        (run / found).rename(run / BEST)
    return found is not None


def figures_of(run, line, family):
    """For acceptance.json of best/: the run's own, if it is of the step of this acceptance line, else what the line says."""
    if _step_of(Path(run)) == line["step"]:
        return json.loads(Path(run, "acceptance.json").read_text(encoding="utf-8"))
    return {"step": line["step"], "family": family} | {name: value for name, value in line.items() if name != "kind"}


def _step_of(folder):
    """The step of a head that was put there whole; None for anything else."""
    try:
        return json.loads((folder / "acceptance.json").read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove(run, name):
    """Rename the folder, then remove it: if the process is killed half-way, no partial folder has the old name."""
    if (run / name).exists():
        shutil.rmtree(run / GONE, ignore_errors=True)
        (run / name).rename(run / GONE)
        shutil.rmtree(run / GONE)
