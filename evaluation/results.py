"""Report, the output of a measurement: a table printed line by line, one JSON object as the last line, and that object as a file.

Every file of benchmarks/results/ is such an object (SCHEMA):

    name      of the benchmark or proof
    date, hardware, versions {package: version}, commit, command    its origin; versions["numerics"]: kernels/numerics.py
    settings  the options of the command
    facts     reference values, and facts about all rows
    rows      the figures
"""

import json
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

from ..heads.storage.atomic_write import check_writable, write_json
from ..kernels.numerics import NUMERICS, installed
from .compare import hardware_name

RESULTS = Path("benchmarks") / "results"
SCHEMA = ("name", "date", "hardware", "versions", "commit", "command", "settings", "facts", "rows")
ROOT = Path(__file__).resolve().parents[1]


class Report:
    """Collects the rows of one benchmark and prints each as soon as it is measured.

    With an output, the rows so far stand in NAME.unfinished.json beside it until `finish`: a measurement that is cut keeps them.

    name: of the benchmark; columns: {key: (title, width, format)}, where format(value) makes the text; command: the command line;
    settings: its options; output: file for the JSON object, see `result_path`; commit: of the code, None to ask git.
    """

    def __init__(self, name, columns, device, command, settings, output=None, commit=None):
        self.columns, self.rows, self.facts, self._headed = columns, [], {}, False
        self.path = None if output is None else result_path(output)
        if self.path is not None:
            check_writable(self.path)
        self.head = {
            "name": name,
            "date": date.today().isoformat(),
            "hardware": hardware_name(device),
            "versions": {"torch": torch.__version__, "triton": installed("triton"), "numerics": NUMERICS},
            "commit": commit or current_commit(),
            "command": command,
            "settings": settings,
        }

    def note(self, text):
        """Print a line between the rows."""
        print(text, flush=True)

    def state(self, text, **facts):
        """Add facts that the rows refer to, as a line and in the object."""
        self.facts |= facts
        self.note(text)

    def table(self, columns):
        """Begin another table: the rows added from now on have these columns."""
        self.columns, self._headed = columns, False

    def add(self, row):
        """Print a row. Keys without a column go only to the object, which keeps six digits of numbers."""
        if not self._headed:
            self._headed = True
            print("\n" + "  ".join(title.rjust(width) for title, width, _ in self.columns.values()))
            print("  ".join("-" * width for _, width, _ in self.columns.values()), flush=True)
        cells = []
        for key, (_, width, form) in self.columns.items():
            value = row.get(key)
            cells.append(("" if value is None else form(value)).rjust(width))
        print("  ".join(cells).rstrip(), flush=True)
        self.rows.append({key: float(f"{x:.6g}") if isinstance(x, float) else x for key, x in row.items()})
        if self.path is not None:
            self._write(self.unfinished)

    @property
    def unfinished(self):
        """Where the rows so far are."""
        return self.path.with_name(f"{self.path.stem}.unfinished.json")

    @property
    def content(self):
        """The object, with the rows so far."""
        return self.head | {"facts": self.facts, "rows": self.rows}

    def _write(self, path):
        write_json(path, self.content, indent=1, ensure_ascii=True)

    def finish(self):
        """Write the file, if one was asked for, and print the object as the last line. Returns the object."""
        print()
        if self.path is not None:
            self._write(self.path)
            self.unfinished.unlink(missing_ok=True)
            print(f"written to {self.path}")
        print(json.dumps(self.content), flush=True)
        return self.content


def command_line(script=None, arguments=None):
    """A command line as it can be pasted: `python SCRIPT ...`, or `headstart ...` without a script.

    arguments: list of str, None for the process's own
    """
    return shlex.join(
        [
            *(["python", script] if script else ["headstart"]),
            *(sys.argv[1:] if arguments is None else map(str, arguments)),
        ]
    )


def result_path(output):
    """The path of `--output`: a path unchanged; a bare name as benchmarks/results/<date>-<name>.json."""
    path = Path(output)
    if path.suffix or len(path.parts) > 1:
        return path
    return RESULTS / f"{date.today().isoformat()}-{output}.json"


def current_commit():
    """The checkout's commit, with "+changes" if files differ from it; None if this is not a git checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        run = [
            subprocess.run(
                ["git", "-C", str(ROOT), *what], capture_output=True, text=True, timeout=20, check=True
            ).stdout
            for what in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the commit is not known: {error}", file=sys.stderr)
        return None
    return run[0].strip() + ("+changes" if run[1].strip() else "")


def plain(value):
    """A number or word, unformatted."""
    return str(value)


def decimals(count):
    """A format with `count` decimals."""
    return lambda value: f"{value:.{count}f}"


def shares_text(shares, most=7):
    """The greatest shares as text: `linear 71 %, ...`."""
    named = [f"{name} {share:.1%}" for name, share in list(shares.items())[:most]]
    rest = 1 - sum(list(shares.values())[:most])
    return ", ".join(named + ([f"other {rest:.1%}"] if len(shares) > most else []))
