"""best/ of a run: the head that was measured best, beside the newest checkpoint.

    runs/<name>/best/    the head's files, as in head/, and acceptance.json: what was measured on it, with its step

The longest acceptance length on held-out prompts decides; of equal ones, the lower held-out loss. What counts are the lines of
metrics.jsonl: a run that goes on from a checkpoint drops those after it, and has the best head of those that are left. So the best
head of the newest checkpoint is kept, as .best.kept, until a checkpoint follows the better one that took its place.
"""

import json
import math
import shutil
from pathlib import Path

from ....heads.checkpoint import BEST
from ....heads.storage.atomic_write import write_json

KEPT, FRESH, GONE = ".best.kept", ".best.new", ".best.gone"


def best_measurement(lines):
    """(the best acceptance line of metrics.jsonl, the number of measurements since); (None, 0) without one.

    Lines of another source than the last one's do not count: the engine's figures and teacher-forced ones do not compare.
    """
    measured = [line for line in lines if line["kind"] == "acceptance"]
    measured = [line for line in measured if line["source"] == measured[-1]["source"]]
    if not measured:
        return None, 0
    best = max(range(len(measured)), key=lambda i: (*_merit(measured[i]), -i))
    return measured[best], len(measured) - 1 - best


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
