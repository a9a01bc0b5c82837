"""The process of its own in which `heads.export verify` loads an export, as a user would, and computes again what it tells.

    python -P -m headstart.hub_export.replay.replay_process REQUEST.json REPLY.json

It compares nothing with tolerances: hub_export/verify.py does, with what is found here. A part that fails says {"error": why}.
"""

import json
import sys
from itertools import groupby
from pathlib import Path

import torch

from ...heads.checkpoint import load_head
from ...inference.arguments import choose_threads_for
from ...inference.models.adapter import has_adapter
from ..acceptance import choose_prompts, measure
from .replay import checksums, compute_outputs, distance, drawn_inputs, largest_errors, project
from .replay_file import read_replay
from .target_features import read_target_inputs

SETTINGS = ("prompts", "num_prompts", "max_tokens", "dtype")  # of a figure, besides its temperature


def main(arguments):
    request_file, reply_file = arguments
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    folder = Path(request["folder"])
    stored = read_replay(folder)
    tensors = _part(_tensors, folder)
    if "error" in tensors:  # a head that does not load computes nothing: no target is loaded for it
        acceptance = [tensors] * len(request["figures"]) if request["target"] else []
        reply = {"tensors": tensors, "drawn": tensors, "target": tensors, "acceptance": acceptance}
        Path(reply_file).write_text(json.dumps(reply), encoding="utf-8")
        return
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
    Path(reply_file).write_text(json.dumps(reply), encoding="utf-8")


def _part(compute, *arguments):
    try:
        return compute(*arguments)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: torch's, of shapes that do not go together
        return {"error": " ".join(str(error).split())}


def _tensors(folder):
    return {"checksums": checksums(load_head(folder))}


def _drawn(folder, stored):
    head = load_head(folder, dtype="float32")
    return {"errors": largest_errors(compute_outputs(head, drawn_inputs(head)), stored["drawn"])}


def _on_target(folder, stored, request):
    head, wanted = load_head(folder, dtype="float32"), stored["target"]
    given = (head, request["target"], folder, stored["prompts"], request["device"])
    inputs, bits = read_target_inputs(*given)
    found, features = project(inputs.features[0, inputs.rows]), torch.tensor(wanted["features"])
    if found.shape != features.shape:
        raise ValueError(f"the prompts give {len(found)} rows of features, the export was made with {len(features)}")
    errors = largest_errors(compute_outputs(head, inputs), wanted["outputs"])
    return {"bits": bits, "distance": distance(found, features), "errors": errors}


def _acceptance(folder, request, figures):
    """Figures of the same settings but the temperature, measured now: [{"by_request": counts}, ...]"""
    said = figures[0]
    prompts = said["prompts"]
    if prompts is None:
        prompts, _ = choose_prompts(request["prompts"], request["target"], said["num_prompts"])
    adapter = str(folder) if has_adapter(folder) else None
    found = measure(
        folder,
        request["target"],
        prompts,
        adapter,
        request["device"],
        request["dtype"] or said["dtype"],
        [figure["temperature"] for figure in figures],
        said["max_tokens"],
    )
    return [{"by_request": one["by_request"]} for one in found]


if __name__ == "__main__":
    main(sys.argv[1:])
