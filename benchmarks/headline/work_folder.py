"""The folder that one headline works in: models and data, and the figures of what is finished.

WORK/settings.json             what everything in it was made with
WORK/figures/STAGE/NAME.json   figures of a finished part, small: all that the tables and a later lease need
WORK/target, draft, heads/     models; WORK/*.jsonl, rows.pt: data
"""

import json
from pathlib import Path

from ...heads.storage.atomic_write import write_json, write_whole

# Settings that may differ between two calls on one folder: what is finished stays as it is.
CHANGEABLE = {"device", "speed_minutes", "math", "shape"}


class WorkFolder:
    """Places in the folder, and the figures in it. ValueError if it was begun with other settings."""

    def __init__(self, folder, settings):
        self.folder, self.settings = Path(folder), settings
        self.target, self.draft, self.heads = (self.folder / name for name in ("target", "draft", "heads"))
        self.answers, self.rows = self.folder / "answers.jsonl", self.folder / "rows.pt"
        kept = {name: value for name, value in vars(settings).items() if name not in CHANGEABLE}
        path = self.folder / "settings.json"
        if path.is_file():
            found = json.loads(path.read_text())
            other = [name for name in kept if found.get(name) != kept[name]]
            if other:
                name = other[0]
                raise ValueError(
                    f"{self.folder} was begun with {name} {found.get(name)!r}, not {kept[name]!r}: name another --work, or the "
                    "same settings"
                )
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, kept, indent=1)

    def heldout(self, subject):
        """The held-out conversations of a subject."""
        return self.folder / f"heldout-{subject}.jsonl"

    @property
    def prompts(self):
        """Training prompts for the target to answer."""
        return self.folder / "prompts.jsonl"

    def figures(self, stage, name="all"):
        """The figures of a finished part; None if it is not finished."""
        path = self._place(stage, name)
        return json.loads(path.read_text()) if path.is_file() else None

    def all_figures(self, stage):
        """{name: figures} of the finished parts of a stage."""
        return {
            path.stem: json.loads(path.read_text()) for path in sorted(self._place(stage, "x").parent.glob("*.json"))
        }

    def keep(self, stage, name, figures):
        """Write the figures of a part, which is thereby finished."""
        path = self._place(stage, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures, indent=1)

    def _place(self, stage, name):
        return self.folder / "figures" / stage / f"{name}.json"

    def add_command(self, command):
        """Add a command line to those that this folder was made with."""
        path = self.folder / "figures" / "commands.txt"
        path.parent.mkdir(exist_ok=True)
        if command not in self.commands():
            write_whole(path, "".join(f"{line}\n" for line in [*self.commands(), command]))

    def commands(self):
        """The command lines that this folder was made with."""
        path = self.folder / "figures" / "commands.txt"
        return path.read_text().splitlines() if path.is_file() else []

    def needs(self, stage, name="all"):
        """The figures of a part that another one follows from. ValueError, saying what to run, if it is not finished."""
        found = self.figures(stage, name)
        if found is None:
            raise ValueError(f"{self.folder} holds no finished stage {stage} ({name}): run it first, --stage {stage}")
        return found
