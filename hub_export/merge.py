"""The adapter of a head trained together with its target (Medusa-2), exported: beside the head in peft's format, or merged.

`copy_adapter` puts adapter/ beside the head's files. `write_merged_target` writes the target with the adapter in its weights: the
files of the source one by one, with their names, dtypes and shards, merged tensor by tensor (inference/models/adapter.py), and
config and tokenizer as they are. Everything written is read back and compared. Not supported: targets that are no safetensors.
"""

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError
from safetensors.torch import save_file

from ..heads.checkpoint import failing_as_oserror, read_tensors
from ..heads.storage.atomic_write import check_is_free, staged_folder
from ..heads.storage.hub_answer import ask_hub
from ..inference.models.adapter import (
    CONFIG_FILE,
    FOLDER,
    MERGED_KEY,
    WEIGHTS_FILE,
    check_merged_once,
    fingerprint,
    read_adapter,
)
from ..inference.models.checkpoint_files import INDEX_FILE, find_files, read_header
from ..inference.models.weights import rows_at_once

# What a model folder holds besides its weights, and what a merged one takes over.
BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "LICENSE*",
    "NOTICE*",
)


def copy_adapter(source, output, base_model):
    """Write the adapter in folder `source` as output/adapter, naming `base_model` as its target, and compare what was written."""
    folder = Path(output, FOLDER)
    folder.mkdir()
    shutil.copyfile(source / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base_model
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    written = read_adapter(folder)
    if written.fingerprint != fingerprint(source):
        raise ValueError(f"{FOLDER}/{WEIGHTS_FILE} read back differs from what was written")
    for name, pair in written.pairs.items():
        if not all(torch.isfinite(tensor).all() for tensor in pair):
            raise ValueError(f"the adapter of {name} holds values that are not finite")


def check_can_merge(adapter, target, output):
    """Everything that `write_merged_target` would refuse, before any work.  -> the target's local folder"""
    check_is_free(output)
    folder = Path(target)
    hub = None if folder.is_dir() else ask_hub()
    try:
        if hub:
            patterns = ["*.safetensors", INDEX_FILE, *BESIDE]
            folder = Path(snapshot_download(target, allow_patterns=patterns, local_files_only=hub.local_files_only))
    except (OSError, ValueError, HTTPError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"cannot get the target {target!r}: no such folder, and {hub.words} did not give it ({reason}): give --base-model"
        ) from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_merged_once(adapter, config.get(MERGED_KEY, ""), target)
    shapes = {name: shape for path in find_files(folder) for name, (_, shape) in read_header(path).items()}
    adapter.check_fits(shapes)
    return folder


def write_merged_target(adapter, folder, output, card):
    """Write the target in `folder` with the Adapter in its weights to the new folder `output`; card: text of its README.md.

    Raises ValueError naming a tensor that reads back differently, OSError where it cannot be written; then there is no `output`.
    Returns the number of tensors that the adapter changed.
    """
    changed = 0
    with staged_folder(output) as staging:
        for path in find_files(folder):
            tensors, place = read_tensors(path), staging / path.name
            for name in tensors.keys() & adapter.pairs.keys():
                tensors[name] = merge_tensor(adapter, name, tensors[name])
                changed += 1
            with failing_as_oserror(place):
                save_file(tensors, place, metadata={"format": "pt"})
            written = read_tensors(place)
            for name, tensor in tensors.items():
                if not torch.equal(written[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)):
                    raise ValueError(f"{path.name}: {name} read back differs from what was written")
        beside = {path for pattern in (INDEX_FILE, *BESIDE) for path in folder.glob(pattern) if path.is_file()}
        for path in beside:
            shutil.copyfile(path, staging / path.name)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {MERGED_KEY: adapter.fingerprint}
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (staging / "README.md").write_text(card, encoding="utf-8")
        for path in staging.glob("*.safetensors"):  # the library makes them readable by the owner alone
            shutil.copymode(staging / "config.json", path)
    return changed


def merge_tensor(adapter, name, tensor):
    """A whole tensor of the target merged in the pieces that loading merges, so that both are the same bits."""
    rows = rows_at_once(tensor)
    pieces = zip(range(0, len(tensor), rows), tensor.split(rows))
    merged = torch.cat([adapter.add_to(name, piece, first).to(tensor.dtype) for first, piece in pieces])
    if not torch.isfinite(merged).all():
        raise ValueError(f"{name} holds values that are not finite once the adapter is merged")
    return merged


def merged_card(target, adapter, head):
    """README.md of a merged target.  target: its name as a card may tell it; head: how the head is called"""
    return (
        f"# {target} with a merged adapter\n\n"
        f"The weights of `{target}` with the LoRA adapter `{adapter.fingerprint}` added (in fp32, rounded once), which was trained "
        f"together with the Medusa heads `{head}` by Headstart (Medusa-2). They are used as they are, with no adapter beside "
        f'them: decoding in Headstart then writes the tokens of `LLM("{target}", adapter="{head}")`, in the dtype of these files '
        "(which `dtype=` says, and a GPU takes by itself).\n\n"
        f"The licence is that of `{target}`.\n"
    )
