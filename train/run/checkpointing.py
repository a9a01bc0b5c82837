"""Checkpoints of a run: everything a resumed run needs to repeat the uninterrupted one bit by bit.

    runs/<name>/checkpoints/step-000200/
        head/           the head, in the dtype it is trained in (load_head reads it); head/adapter/ the target's adapter, in peft's
                        format, of a run that trains one beside the head (train/teacher/target_adapter.py)
        optimizer.pt    the optimiser's whole state (fp32), however many processes held it
        rng.pt          state of the random generators (python, numpy, torch, cuda) of every rank
        state.json      step, what the run counts, the rates that its loss follows, the recipe, and the size (if asked for, the
                        checksum, too) of every file; written last

A checkpoint is written aside and renamed, so it exists whole or not at all. The data position is the step: the order of the
rows follows from the recipe and the step (train/data/rows.py). A run can go on with another number of processes, if the rows per
optimiser step stay the same: noise is drawn per place in the step's rows, and only an adapter's dropout comes from the saved
generators.
"""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object

from ...heads.checkpoint import copy_head, load_head
from ...heads.families import check_family, family_of
from ...heads.storage.atomic_write import is_partial, staged_folder
from ...inference.models.adapter import FOLDER as ADAPTER_FOLDER
from .sharded_optimizer import ShardedAdamW

_STEP = re.compile(r"step-(\d+)")
_TRIAL = ".can-be-written-"


def list_checkpoints(run):
    """Checkpoint folders of a run, oldest first."""
    found = [path for path in Path(run, "checkpoints").glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(_STEP.fullmatch(path.name)[1]))


def copy_checkpoint(run, write_head, *, optimizer, state, accelerator, num_kept, checksums=False):
    """Copy what a checkpoint of `run` holds to the host's memory. Called on every rank. -> write() on the main rank, else None

    write(), which a thread may call, writes the checkpoint, then removes all but the newest `num_kept` up to it. Checkpoints of
    later steps are removed too: they exist if the run was taken back to an earlier checkpoint, and are not the present run's. It
    raises OSError if the checkpoint cannot be written; existing ones then stay.

    write_head: of copy_head_folder, on the main rank; state: a JSON-able dict with the step, which `read_state` returns; checksums:
    whether a checksum of every file is kept.
    """
    rng = gather_object([_rng_state(accelerator.device)])
    optimizer_state = optimizer.state_dict()
    if not accelerator.is_main_process:
        return None
    if not isinstance(optimizer, ShardedAdamW):  # which gives a copy already
        optimizer_state = _copy_to_host(optimizer_state)
    state = json.loads(json.dumps(state))

    def write():
        folder = Path(run, "checkpoints", f"step-{state['step']:06d}")
        # A run taken back to an earlier checkpoint saves this step again: the old checkpoint stays until the new one is whole.
        fresh = folder.with_name(f".{folder.name}.new") if folder.exists() else folder
        if fresh != folder:
            shutil.rmtree(fresh, ignore_errors=True)
        with staged_folder(fresh) as staging:
            write_head(staging / "head")
            _save_tensors(optimizer_state, staging / "optimizer.pt")
            _save_tensors(rng, staging / "rng.pt")
            files = sorted(path for path in staging.rglob("*") if path.is_file())
            manifest = {path.relative_to(staging).as_posix(): _fingerprint(path, checksums) for path in files}
            text = json.dumps(state | {"files": manifest}, indent=2)
            (staging / "state.json").write_text(text, encoding="utf-8")
        if fresh != folder:
            _replace_folder(folder, fresh)
        # By step, not by age: the checkpoint just written is the newest of the present run, so it is never removed.
        steps = {path: int(_STEP.fullmatch(path.name)[1]) for path in list_checkpoints(run)}
        later = [path for path in steps if steps[path] > state["step"]]
        up_to_now = [path for path in steps if steps[path] <= state["step"]]
        for path in (*later, *up_to_now[:-num_kept]):
            _remove_folder(path)

    return write


def _copy_to_host(value):
    """The nested dicts and lists of a state with copies of their tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: _copy_to_host(one) for name, one in value.items()}
    return [_copy_to_host(one) for one in value] if isinstance(value, list) else value


def restore_replaced(run):
    """Finish the replacement of a checkpoint that a kill interrupted; any rank may do it first."""
    for aside in sorted(Path(run, "checkpoints").glob(".step-*.new")) + sorted(
        Path(run, "checkpoints").glob(".step-*.old")
    ):
        folder = aside.with_name(aside.name[1:-4])
        if _STEP.fullmatch(folder.name) and not folder.exists():
            with contextlib.suppress(FileNotFoundError):
                aside.rename(folder)


def remove_leftovers(run):
    """Remove the unfinished files and folders of processes that were killed; by the main rank, while nothing is being saved."""
    for path in (*Path(run, "checkpoints").glob(".*step-*"), *Path(run).glob(".*")):
        if path.parent.name == "checkpoints" or is_partial(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def choose_checkpoint(run, wanted=""):
    """The checkpoint folder to resume from: `wanted`, else the newest of `run`. The size of its files is checked, and their
    checksums, if it has any.

    None for a run that was killed before its first checkpoint and can only start again. Raises ValueError for a folder without
    checkpoints that holds anything else, and for damage, naming the file and the newest earlier whole checkpoint.
    """
    restore_replaced(run)
    folder = Path(wanted) if wanted else next(reversed(list_checkpoints(run)), None)
    if folder is None:
        run = Path(run)
        if (run / "head").exists():
            raise ValueError(
                f"{str(run)!r} holds a finished head/ and no checkpoint, so it cannot be resumed: name a new output, or put "
                f"its checkpoints back into {str(run / 'checkpoints')!r}"
            )
        if not (run / "config.yaml").is_file():
            raise ValueError(
                f"{str(run)!r} holds neither a checkpoint nor a config.yaml, so there is no run to resume: check output, or "
                "name a new one and leave --resume out"
            )
        return None
    damage = find_damage(folder)
    if damage:
        siblings = list_checkpoints(folder.parent.parent)
        earlier = [path for path in siblings if path.name < folder.name and not find_damage(path)]
        advice = f"go on from the one before with --resume_from {earlier[-1]}" if earlier else "no earlier one is whole"
        raise ValueError(f"the checkpoint {folder} is damaged: {damage}; {advice}")
    return folder


def save_final_head(head, run, adapter=None):
    """Write <run>/head, with the TargetAdapter `adapter` in it, if there is one.

    If the run was extended, its earlier head is replaced once the new one is complete.
    """
    fresh = Path(run, ".head.new")
    shutil.rmtree(fresh, ignore_errors=True)
    copy_head_folder(head, adapter)(fresh)
    _replace_folder(Path(run, "head"), fresh)


def copy_head_folder(head, adapter=None):
    """Copy the head's files to the host's memory, and those of its TargetAdapter, which its config then names.

    -> write(folder): writes them into a new folder, whole or not at all; a thread may call it.
    """
    if adapter is not None:
        write_adapter, name = adapter.copy()
        head.config = replace(head.config, adapter=name)
    write_head = copy_head(head)

    def write(folder):
        with staged_folder(folder) as staging:
            write_head(staging)
            if adapter is not None:
                write_adapter(staging / ADAPTER_FOLDER)

    return write


def find_damage(folder):
    """The fault of a checkpoint, naming the file; an empty string if it is whole."""
    path = Path(folder, "state.json")
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{path} is not the JSON that was written"
    for name, expected in files.items():
        path = Path(folder, name)
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path} holds {size} of {expected['bytes']} bytes"
        if "crc32" in expected and _fingerprint(path, True) != expected:
            return f"the bytes of {path} are not those that were written"
    return ""


def check_output(run, resume, resume_from):
    """Refuse a run folder that holds something (unless the run goes on there) or cannot be written.

    It leaves no file there. Raises ValueError that says what to do.
    """
    run = Path(run)
    if run.exists() and not run.is_dir():
        raise ValueError(f"output {str(run)!r} is a file: name a new run folder")
    # Other ranks test writing here at the same moment: their trial files do not count.
    names = [path.name for path in run.iterdir()] if run.is_dir() else []
    inside = sorted(name for name in names if not name.startswith(_TRIAL) and not is_partial(name))
    if inside == ["config.yaml"] and not resume:
        inside = []  # only the rest of a run that was refused, or killed, before it made anything worth keeping
    if resume and not inside:
        raise ValueError(f"there is no run in {str(run)!r} to resume: check output, or leave --resume out")
    if resume_from and not Path(resume_from).is_dir():
        raise ValueError(f"resume_from {resume_from!r}: there is no such checkpoint folder")
    if inside and not resume and not resume_from:
        raise ValueError(
            f"the run folder {str(run)!r} already holds {', '.join(inside[:3])}: add --resume to go on with it, or name a "
            "new output"
        )
    checkpoints = (run / "checkpoints").resolve()
    if inside and resume_from and checkpoints not in Path(resume_from).resolve().parents:
        raise ValueError(
            f"the run folder {str(run)!r} already holds {', '.join(inside[:3])}, which a run that goes on from "
            f"{str(resume_from)!r} would overwrite: name a new output, or a checkpoint in {str(run / 'checkpoints')!r}"
        )
    _try_writing(run)


def _try_writing(run):
    """ValueError unless files can be made in `run`, or in the nearest existing folder above it."""
    nearest = run
    try:
        nearest = next(path for path in (run, *run.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(prefix=_TRIAL, dir=nearest):
            pass
    except OSError as error:
        raise ValueError(
            f"output {str(run)!r} cannot be written: no file can be made in {str(nearest)!r} ({error.strerror or error}); "
            "name a folder in a place that can be written"
        ) from error


def check_same_run(saved, state, defaults, changeable, note):
    """The saved state, if the resumed run is the saved one; `state` is what the run would start with.

    defaults: of the recipe's keys; a key newer than the checkpoint counts as its default, which changes nothing.
    changeable: keys of the recipe that may differ. Raises ValueError naming another key that differs, or for other rows.
    """
    old, new = defaults | saved["recipe"], state["recipe"]
    if new.get("loss") == "lk" and saved["step"] and "rates" not in saved:
        raise ValueError(
            "the checkpoint was written by another version, whose lk did not follow the mean rate of acceptance: go on with that "
            "version, or start a new output"
        )
    changed = [name for name in new if new[name] != old[name]]
    for name in changed:
        if name not in changeable:
            raise ValueError(
                f"this run was started with {name} {old[name]!r}, not {new[name]!r}: a resumed run keeps it; give the "
                "old value, or start a new output"
            )
    if saved["rows"] != state["rows"]:
        raise ValueError(
            f"the data gives other rows than when the run was started ({saved['rows']}, now {state['rows']}): a resumed run needs "
            "the same data and tokenizer, and, where the data give up what is measured on, the same eval_prompts and eval_data"
        )
    if saved["rows_per_step"] != state["rows_per_step"]:
        raise ValueError(describe_rows_per_step(saved["rows_per_step"], state["rows_per_step"], new))
    if changed:
        changes = [f"{name} {old[name]!r} -> {new[name]!r}" for name in changed]
        note(f"changed since the run was started: {', '.join(changes)}")
    return {name: value for name, value in saved.items() if name != "files"} | {"recipe": new}


def describe_rows_per_step(wanted, given, recipe):
    """Error text for a run of `wanted` rows per optimiser step resumed with `given`, with keys of recipe (a dict) that fit."""
    batch_rows, accumulate = recipe["batch_rows"], recipe["accumulate"]
    processes = given // (batch_rows * accumulate)
    if wanted % (batch_rows * processes) == 0:
        advice = f"set accumulate to {wanted // (batch_rows * processes)}"
    elif wanted % processes == 0:
        advice = f"set batch_rows and accumulate so that their product is {wanted // processes}"
    else:
        advice = f"start a number of processes that divides {wanted}"
    return (
        f"the run was started with {wanted} rows per optimiser step, now batch_rows {batch_rows} x accumulate {accumulate} x "
        f"{processes} processes make {given}, and a resumed run keeps them: {advice}"
    )


def read_state(folder):
    """The `state` that the checkpoint was saved with, and its step."""
    return json.loads(Path(folder, "state.json").read_text(encoding="utf-8"))


def load_checkpoint(folder, head, optimizer, accelerator, adapter=None):
    """Load the checkpoint's state into head, adapter (a TargetAdapter, or None), optimiser and this rank's random generators.

    The checkpoint may have been written by any number of processes."""
    saved = load_head(Path(folder, "head"))
    check_family(saved, family_of(head))
    if head.embedding_is_targets:  # never overwritten, and absent from most checkpoints
        saved.take_embedding(head.embed_tokens.weight)
    head.load_state_dict(saved.state_dict())
    if adapter is not None:
        adapter.load(Path(folder, "head", ADAPTER_FOLDER))
    # To the CPU first: load_state_dict itself moves a fused optimiser's steps and moments to the device.
    whole = torch.load(Path(folder, "optimizer.pt"), map_location="cpu", weights_only=True, mmap=True)
    optimizer.load_state_dict(whole)
    states = torch.load(Path(folder, "rng.pt"), map_location="cpu", weights_only=True)
    _set_rng_state(states[accelerator.process_index % len(states)], accelerator.device)


def _remove_folder(folder):
    """Rename a folder, then remove it: if the process is killed half-way, no partial folder has the old name."""
    gone = folder.with_name(f".{folder.name}.gone")
    folder.rename(gone)
    shutil.rmtree(gone)


def _replace_folder(folder, fresh):
    """Put the complete `fresh` in the place of `folder`. The old folder is removed last, so one of the two always exists."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _save_tensors(value, path):
    """torch.save that raises OSError for a full disk: torch raises a RuntimeError with the OSError as its context."""
    try:
        with path.open("wb") as file:
            torch.save(value, file)
    except RuntimeError as error:
        system = error.__context__ if isinstance(error.__context__, OSError) else None
        reason = system.strerror if system else (str(error).strip().splitlines() or ["no reason given"])[0]
        raise OSError(system.errno if system else errno.EIO, f"{path.name}: {reason}") from error


def _rng_state(device):
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _set_rng_state(state, device):
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:  # None where it was saved on a CPU
        torch.cuda.set_rng_state(state["cuda"], device)


def _fingerprint(path, with_checksum):
    if not with_checksum:
        return {"bytes": os.path.getsize(path)}
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": os.path.getsize(path), "crc32": checksum}
