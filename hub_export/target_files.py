"""What an export takes over of its target's files: the tokenizer; and what the target's own card says of its licence.

Looks into the target's folder or the Hub's cache, and asks no network: a plain export needs no target.
"""

import importlib.metadata
import re
import shutil
from pathlib import Path

import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError

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


def find_target(target):
    """The folder of a target, or the part of it that lies in the Hub's cache; None where neither is there."""
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
    """Copy a target's tokenizer files into `output`.  folder: of find_target, or None.  Returns the names of what was copied."""
    found = [] if folder is None else [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for name in found:
        shutil.copyfile(folder / name, Path(output, name))
    return found


def license_of(folder):
    """The licence that the front matter of a model folder's README.md names, or None.  folder: of find_target, or None"""
    found = None if folder is None else read_front_matter(folder).get("license")
    return found if isinstance(found, str) else None


def read_front_matter(folder):
    """The YAML at the head of a folder's README.md as a dict; {} where there is none, or none that can be read."""
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
    """ValueError for what is no licence id in form: the Hub refuses a card with one."""
    if license is not None and not is_license_id(license):
        raise ValueError(
            f"--license {license!r} is no licence id: expected one like apache-2.0 (lower case letters, digits, dots, hyphens); "
            "the Hub lists them at https://huggingface.co/docs/hub/repositories-licenses"
        )


def is_license_id(text):
    """Whether `text` has the form of a licence id."""
    return re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text) is not None


def write_license(license, output):
    """Write LICENSE into `output` where the licence's text is at hand.  Returns whether it was.

    Headstart carries the text of its own, Apache 2.0, which is the same for whoever uses it. Others name their holder in the text.
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
