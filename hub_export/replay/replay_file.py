"""replay.json: what an export wrote and what its head computed, for `heads.export verify`.

files, config, tensors   checksums of the files that say what the head is; config.json itself; checksums of the tensors as loaded
drawn                    outputs for drawn inputs (replay.py); target: those on the target's own features, where it was at hand
acceptance, prompts      figures (acceptance.py), and the prompts (token ids) that they were measured on
rates, benchmark, recipe, step, origin   what the model card tells besides, for an export of this export
"""

import hashlib
import importlib.metadata
import json
from pathlib import Path

import torch

from ...heads.checkpoint import load_head, read_config
from ..figure_shapes import VERIFIED, check_shape
from ..measurements import REPLAY_FILE, REPLAY_VERSION
from .replay import checksums, compute_outputs, describe, drawn_inputs, project, rounded
from .target_features import read_target_inputs

KEYS = ("files", "config", "tensors", "drawn", "target", "acceptance", "prompts")
# Cards, licences and drawings may be edited.
SUFFIXES = (".safetensors", ".bin", ".pt", ".json", ".model", ".jinja", ".txt")


def write_replay(folder, measured, prompts=None, target_record=None):
    """Write replay.json into an export whose other files are there.  target_record: of `replay_on_target`, or None"""
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
    """What the head in `folder` computes from the target's own features: as replay.json keeps it.  name: the target's, to tell"""
    head = load_head(folder, dtype="float32")
    inputs, bits = read_target_inputs(head, target, Path(folder), prompts, device)
    return {
        "name": name,
        "bits": bits,
        "features": rounded(project(inputs.features[0, inputs.rows])),
        "outputs": describe(compute_outputs(head, inputs)),
    }


def read_replay(folder):
    """replay.json as a dict; ValueError where it is missing, broken, or of another version."""
    path = Path(folder, REPLAY_FILE)
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {REPLAY_FILE}, so there is nothing to compare it with: `heads.export` writes one beside a head"
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
    check_shape(content, VERIFIED, path)
    return content


def file_checksums(folder):
    """{path in the folder: SHA-256} of the files that say what a head is."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.suffix in SUFFIXES and name != REPLAY_FILE:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def tolerance(bits):
    """The key of replay.py's tolerances for a target that computed in a dtype of so many bits."""
    return "32 bits" if bits >= 32 else "16 bits"
