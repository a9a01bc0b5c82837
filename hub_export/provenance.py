"""Provenance of an export: the head it was converted from, the files it copies from its target, and the merged target.

`find_origin` looks only at SOURCE, and at the licence in its card. `find_target` looks for tokenizer and licence in the target's
folder or the Hub's cache, without the network: a plain export needs no target. `copy_adapter` puts the adapter of a head trained
together with its target (Medusa-2) beside the head's files, in peft's format. `write_merged_target` writes the target with the
adapter in its weights: files, names, dtypes and shards are the source's, tensors are merged one by one
(inference/models/adapter.py), config and tokenizer are copied. Everything written is read back and compared. Not supported:
targets that are not safetensors.
"""

import contextlib
import importlib.metadata
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HTTPError
from safetensors.torch import save_file

from ..heads.checkpoint import failing_as_oserror, read_tensors
from ..heads.storage.atomic_write import check_is_free, staged_folder
from ..heads.storage.hub_answer import ask_hub, hub_options
from ..heads.storage.hub_id import split_revision
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
from .measurements import REPLAY_FILE

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
OUR_LICENSE = "apache-2.0"
# Files of a model folder beside its weights, which a merged target copies.
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


@dataclass(frozen=True)
class Origin:
    """The head that an export was converted from, if it has its own card.

    name: a Hub id, or the name of a folder; license: the licence's keys and values in its card; again: Headstart exported it, from
    a run or from a head without a card
    """

    name: str
    revision: str | None
    on_hub: bool
    license: dict
    again: bool = False

    @property
    def record(self):
        """The form in replay.json, for an export of this export."""
        return {"name": self.name, "revision": self.revision, "on_hub": self.on_hub, "again": self.again}

    @property
    def link(self):
        """Its name for the card, as a link if it is on the Hub."""
        return f"[{self.name}](https://huggingface.co/{self.name})" if self.on_hub else f"`{self.name}`"

    @property
    def text(self):
        """A sentence for the card."""
        done = "Exported again" if self.again else "Converted"
        return f"{done} from {self.link}{f', revision `{self.revision}`' if self.revision else ''}."

    @property
    def card(self):
        """Words for the card that names its licence."""
        return "the card of its earlier export" if self.again else "the card of the head it was converted from"

    @property
    def license_name(self):
        """The licence in words; None if the card names none."""
        return self.license.get("license_name") or self.license.get("license")


def find_origin(source, folder, earlier=None):
    """The Origin of a head; None if `source` is not a Hub id, its folder has no card with a front matter, and `earlier` is None.

    source: as given; folder: resolve_head's result for it; earlier: `record` in the replay.json of `folder`, or None.
    """
    on_hub = not Path(source).is_dir()
    if on_hub:
        name, revision = split_revision(source)
        with contextlib.suppress(OSError, ValueError, HTTPError):  # there is no card, or not in the cache
            hf_hub_download(name, "README.md", revision=Path(folder).name, **hub_options(source))
    front = read_front_matter(folder)
    # The origin of an export counts for an export of it, unless that origin is a folder on the publisher's machine.
    if earlier and (earlier["on_hub"] or not on_hub):
        told = (earlier.get(key) for key in ("name", "revision", "on_hub"))
        return Origin(*told, _license_of(front), earlier.get("again", False))
    # If replay.json was left out, the card says that Headstart exported it.
    ours = Path(folder, REPLAY_FILE).is_file() or front.get("library_name") == "headstart"
    again = earlier.get("again", False) if earlier else ours
    if on_hub:
        return Origin(name, revision, True, _license_of(front), again)
    return Origin(Path(folder).resolve().name, None, False, _license_of(front), again) if front else None


def _license_of(front):
    """The keys of a front matter for the licence; {} if it names none, or an invalid id."""
    id, name, link = (front.get(key) for key in ("license", "license_name", "license_link"))
    if not isinstance(id, str) or not is_license_id(id) or (id, name) == ("other", "not-stated"):
        return {}
    if id != "other":
        return {"license": id}
    found = {"license": id, "license_name": name} if isinstance(name, str) else {"license": id}
    # A relative link into the repository does not work from another repository.
    return found | ({"license_link": link} if str(link).startswith("https://") else {})


def find_target(target):
    """The folder of a target, or the part of it in the Hub's cache; None if neither exists."""
    if not target:
        return None
    if Path(target).is_dir():
        return Path(target)
    try:
        return Path(
            snapshot_download(str(target), allow_patterns=[*TOKENIZER_FILES, "README.md"], local_files_only=True)
        )
    except (OSError, ValueError, HTTPError):
        return None


def copy_tokenizer(folder, output):
    """Copy a target's tokenizer files into `output`.  folder: of find_target, or None.  Returns the names of the copied files."""
    found = [] if folder is None else [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for name in found:
        shutil.copyfile(folder / name, Path(output, name))
    return found


def license_of(folder):
    """The licence that the front matter of a model folder's README.md names, or None.  folder: of find_target, or None"""
    found = None if folder is None else read_front_matter(folder).get("license")
    return found if isinstance(found, str) else None


def read_front_matter(folder):
    """The YAML at the head of a folder's README.md as a dict; {} if there is none, or it cannot be read."""
    path = Path(folder, "README.md")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not text.startswith("---\n"):
        return {}
    try:
        front = yaml.safe_load(text[4:].split("\n---\n", 1)[0])
    except (ValueError, yaml.YAMLError):
        return {}
    return front if isinstance(front, dict) else {}


def check_license(license):
    """ValueError for text without the form of a licence id: the Hub would refuse the card."""
    if license is not None and not is_license_id(license):
        raise ValueError(
            f"--license {license!r} is not a licence id: expected one like apache-2.0 (lower case letters, digits, dots, hyphens); "
            "the Hub lists them at https://huggingface.co/docs/hub/repositories-licenses"
        )


def is_license_id(text):
    """Whether `text` has the form of a licence id."""
    return re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text) is not None


def write_license(license, output):
    """Write LICENSE into `output` if the licence's text is available.  Returns whether it was.

    Headstart has only the text of its own licence, Apache 2.0, which is the same for all users. Others name their holder in the
    text.
    """
    text = _our_license() if license == OUR_LICENSE else None
    if text is not None:
        Path(output, "LICENSE").write_text(text, encoding="utf-8")
    return text is not None


def _our_license():
    """The text of Headstart's LICENSE: of the checkout, else of the installed package."""
    path = Path(__file__).parents[1] / "LICENSE"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    try:
        files = importlib.metadata.files("headstart") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((file.read_text(encoding="utf-8") for file in files if file.name == "LICENSE"), None)


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
    """Raise every ValueError of `write_merged_target` before any work.  -> the target's local folder"""
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
            f"cannot get the target {target!r}: give --base-model. There is no such folder, and {hub.words} did not give it: "
            f"{reason}"
        ) from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_merged_once(adapter, config.get(MERGED_KEY, ""), target)
    shapes = {name: shape for path in find_files(folder) for name, (_, shape) in read_header(path).items()}
    adapter.check_fits(shapes)
    return folder


def write_merged_target(adapter, folder, output, card):
    """Write the target in `folder` with the Adapter in its weights to the new folder `output`; card: text of its README.md.

    Raises ValueError naming a tensor that reads back differently, and OSError if writing fails; then there is no `output`.
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
        for path in staging.glob("*.safetensors"):  # the library makes them readable by the owner only
            shutil.copymode(staging / "config.json", path)
    return changed


def merge_tensor(adapter, name, tensor):
    """Merge a whole tensor of the target, in the same pieces as loading does, so that both give the same bits."""
    rows = rows_at_once(tensor)
    pieces = zip(range(0, len(tensor), rows), tensor.split(rows))
    merged = torch.cat([adapter.add_to(name, piece, first).to(tensor.dtype) for first, piece in pieces])
    if not torch.isfinite(merged).all():
        raise ValueError(f"{name} holds values that are not finite once the adapter is merged")
    return merged


def merged_card(target, adapter, head):
    """README.md of a merged target.  target: its public name; head: the head's name"""
    return (
        f"# {target} with a merged adapter\n\n"
        f"The weights of `{target}` with the LoRA adapter `{adapter.fingerprint}` added (in fp32, rounded once), which was trained "
        f"together with the Medusa heads `{head}` by Headstart (Medusa-2). They are used as they are, with no adapter beside "
        f'them: decoding in Headstart then writes the tokens of `LLM("{target}", adapter="{head}")`, in the dtype of these files '
        "(which `dtype=` says, and a GPU takes by itself).\n\n"
        f"The licence is that of `{target}`.\n"
    )
