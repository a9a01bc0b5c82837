"""Documents, recipes and help texts name files of this repository that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "assets|benchmarks|commands|configs|docs|evaluation|heads|hub_export|inference|kernels|tests|train"
# A path from the root: not the end of a longer one, nor the beginning of a pattern (heads/<name>.py, configs/*.yaml).
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w(?![\w./-]*[<*{{])")
LINK = re.compile(r"\]\(([^)#:]+\.(?:md|svg))\)")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
RECIPES = sorted(ROOT.glob("configs/**/*.yaml"))
SOURCES = [ROOT / "cli.py", *(path for name in FOLDERS.split("|") for path in sorted(ROOT.glob(f"{name}/**/*.py")))]
# Not texts for users: tests make files of such names, and the log tells of files that are gone.
READ = [path for path in DOCUMENTS + RECIPES + SOURCES if "tests" not in path.parts and path.name != "log.md"]


def missing_paths(text, folder):
    """What `text`, of a file in `folder`, names and is not there."""
    found = [path for path in PATH.findall(text) if not re.fullmatch(r"train/\w+", path)]  # W&B's key of a figure
    named = {ROOT / path for path in found} | {folder / path for path in LINK.findall(text)}
    return sorted(str(path) for path in named if not path.exists())


@pytest.mark.parametrize("kind", [DOCUMENTS, RECIPES, SOURCES], ids=["documents", "recipes", "sources"])
def test_every_path_that_is_named_exists(kind):
    files = [path for path in kind if path in READ]
    found = {str(path): missing_paths(path.read_text(encoding="utf-8"), path.parent) for path in files}
    assert not {path: missing for path, missing in found.items() if missing}
    assert sum(len(PATH.findall(path.read_text(encoding="utf-8"))) for path in files) > 20


def test_a_path_that_is_gone_is_found():
    text = "see train/medusa.py, configs/trees and `train/gone.py`. heads/<name>.py runs/heads/x [text](nowhere.md)"
    assert missing_paths(text, ROOT / "docs") == [str(ROOT / "docs/nowhere.md"), str(ROOT / "train/gone.py")]
