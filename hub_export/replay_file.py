"""replay.json, the record of an export's files and its head's outputs; and the process in which `heads.export verify` repeats them.

    python -P -m headstart.hub_export.replay_file REQUEST.json REPLY.json

The process loads the export as a user would. It does not compare: hub_export/verify.py compares its results within tolerances. A
part that fails becomes {"error": reason}. Keys of replay.json:

files, config, tensors   checksums of the files that define the head; config.json itself; checksums of the tensors as loaded
drawn, target            outputs for drawn inputs (replay.py); outputs on the target's own features, if it was available
acceptance, prompts      figures (acceptance.py), and the prompts (token ids) that they were measured on
rates, benchmark, recipe, step, origin   further facts of the model card, for an export of this export
"""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import torch

from ..heads.checkpoint import load_head, read_config
from ..inference.arguments import choose_threads_for
from ..inference.models.adapter import has_adapter
from .acceptance import choose_prompts, measure
from .measurements import REPLAY_FILE, REPLAY_VERSION, Verified, check_type
from .replay import (
    checksums,
    compute_outputs,
    describe,
    distance,
    drawn_inputs,
    largest_errors,
    project,
    read_target_inputs,
    rounded,
)

KEYS = ("files", "config", "tensors", "drawn", "target", "acceptance", "prompts")
SETTINGS = ("prompts", "num_prompts", "max_tokens", "dtype")  # of a figure, beside its temperature
# Cards, licences and drawings may be edited.
SUFFIXES = (".safetensors", ".bin", ".pt", ".json", ".model", ".jinja", ".txt")


def write_replay(folder, measured, prompts=None, target_record=None):
    """Write replay.json into an export whose other files are complete.  target_record: of `replay_on_target`, or None"""
    head = load_head(folder)
    tensors = checksums(head)
    head = head.float()
    try:
        version = importlib.metadata.version("headstart")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        version = "unknown"
    content = {
        "version": REPLAY_VERSION,
        "written_by": {"headstart": version, "torch": torch.__version__},
        "files": file_checksums(folder),
        "config": read_config(folder),
        "tensors": tensors,
        "drawn": describe(compute_outputs(head, drawn_inputs(head))),
        "target": target_record,
        "acceptance": list(measured.acceptance),
        "prompts": prompts,
        "rates": measured.rates,
        "benchmark": measured.benchmark,
        "recipe": measured.recipe,
        "step": measured.step,
        "origin": measured.origin,
    }
    Path(folder, REPLAY_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def replay_on_target(folder, target, name, prompts, device="auto"):
    """Outputs of the head in `folder` on the target's own features, in the form of replay.json.  name: the target's public name"""
    head = load_head(folder, dtype="float32")
    inputs, bits = read_target_inputs(head, target, Path(folder), prompts, device=device)
    return {
        "name": name,
        "bits": bits,
        "features": rounded(project(inputs.features[0, inputs.rows])),
        "outputs": describe(compute_outputs(head, inputs)),
    }


def read_replay(folder):
    """replay.json as a dict; ValueError if it is missing, broken, or of another version."""
    path = Path(folder, REPLAY_FILE)
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {REPLAY_FILE}, which `heads.export` writes beside a head: there is nothing to compare the head with"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch the export again") from None
    if not isinstance(content, dict) or content.get("version") != REPLAY_VERSION:
        found = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{path} is of version {found!r}, expected {REPLAY_VERSION}: verify it with the Headstart that wrote it"
        )
    absent = [key for key in KEYS if key not in content]
    if absent:
        raise ValueError(f"{path} lacks {', '.join(absent)}: fetch the export again")
    check_type(content, Verified, path)
    return content


def file_checksums(folder):
    """{path in the folder: SHA-256} of the files that define a head."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.suffix in SUFFIXES and name != REPLAY_FILE:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def tolerance(bits):
    """The key of replay.py's tolerances for a target that computed in a dtype of `bits` bits."""
    return "32 bits" if bits >= 32 else "16 bits"


def in_clean_process(request):
    """The result of `compute_again` in a separate process; {"error": reason} if the process ends without a result."""
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch, "request.json"), Path(scratch, "reply.json")
        files[0].write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "headstart.hub_export.replay_file", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not files[1].is_file():
            return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
        return json.loads(files[1].read_text(encoding="utf-8"))


def compute_again(request):
    """Compute an export's outputs and measure its figures again, as a dict.

    request: {"folder", "target" (or None), "device", "dtype" (or None), "prompts": file or None, "figures": settings to measure in}
    """
    folder = Path(request["folder"])
    stored = read_replay(folder)
    tensors = _part(_tensors, folder)
    if "error" in tensors:  # without a head nothing can be computed, so no target is loaded
        acceptance = [tensors] * len(request["figures"]) if request["target"] else []
        return {"tensors": tensors, "drawn": tensors, "target": tensors, "acceptance": acceptance}
    reply = {"tensors": tensors, "drawn": _part(_drawn, folder, stored)}
    if request["target"]:
        choose_threads_for(request["target"], request["device"])
        if stored["target"]:
            reply["target"] = _part(_on_target, folder, stored, request)
        reply["acceptance"] = []
        for _, group in groupby(request["figures"], lambda figure: [figure[name] for name in SETTINGS]):
            figures = list(group)  # one engine serves all temperatures
            found = _part(_acceptance, folder, request, figures)
            reply["acceptance"] += [found] * len(figures) if isinstance(found, dict) else found
    return reply


def _part(compute, *arguments):
    try:
        return compute(*arguments)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: torch's, for shapes that do not fit
        return {"error": " ".join(str(error).split())}


def _tensors(folder):
    return {"checksums": checksums(load_head(folder))}


def _drawn(folder, stored):
    head = load_head(folder, dtype="float32")
    return {"errors": largest_errors(compute_outputs(head, drawn_inputs(head)), stored["drawn"])}


def _on_target(folder, stored, request):
    head, wanted = load_head(folder, dtype="float32"), stored["target"]
    inputs, bits = read_target_inputs(head, request["target"], folder, stored["prompts"], device=request["device"])
    found, features = project(inputs.features[0, inputs.rows]), torch.tensor(wanted["features"])
    if found.shape != features.shape:
        raise ValueError(f"the prompts give {len(found)} rows of features, the export was made with {len(features)}")
    errors = largest_errors(compute_outputs(head, inputs), wanted["outputs"])
    return {"bits": bits, "distance": distance(found, features), "errors": errors}


def _acceptance(folder, request, figures):
    """Measure figures that differ only in their temperature: [{"by_request": counts}, ...]"""
    said = figures[0]
    prompts = said["prompts"]
    if prompts is None:
        prompts, _ = choose_prompts(request["prompts"], request["target"], said["num_prompts"])
    adapter = str(folder) if has_adapter(folder) else None
    found = measure(
        folder,
        request["target"],
        prompts,
        adapter=adapter,
        device=request["device"],
        dtype=request["dtype"] or said["dtype"],
        temperatures=[figure["temperature"] for figure in figures],
        max_tokens=said["max_tokens"],
    )
    return [{"by_request": one["by_request"]} for one in found]


if __name__ == "__main__":
    _, request_file, reply_file = sys.argv
    found = compute_again(json.loads(Path(request_file).read_text(encoding="utf-8")))
    Path(reply_file).write_text(json.dumps(found), encoding="utf-8")
