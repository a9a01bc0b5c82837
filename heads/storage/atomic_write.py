"""Files that a command will write: whether they can be, asked before the work is done; and writing them whole. No torch."""

import contextlib
from pathlib import Path


def check_writable(path):
    """Raise ValueError now, not after minutes of work, if a file cannot be written at `path` (a Path); makes its folder."""
    aside = _aside(path)
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name a file with --output")
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("a"):
            pass
        aside.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}; name another file with --output") from error


def write_whole(path, text):
    """Write a text file whole or not at all: aside, then renamed.  Raises OSError naming it"""
    path = Path(path)
    aside = _aside(path)
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _aside(path):
    return path.with_name(path.name + ".tmp")
