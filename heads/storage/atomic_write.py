"""Atomic writes: write beside the destination, flush to the disk, rename. A finished name is always whole. No torch.

An unfinished file or folder is called .NAME.partial-XXXXXXXX. A process that is killed leaves it behind: `is_partial` knows the
name, and the owner of the folder removes it.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path

_PARTIAL = re.compile(r"\.(?P<name>.+)\.partial-[0-9a-f]{8}")


def is_partial(name):
    """Whether this is the name of an unfinished file or folder."""
    return _PARTIAL.fullmatch(name) is not None


def check_writable(path):
    """Make the folder of `path` (a Path), and raise ValueError now, not after minutes of work, if no file can be written there."""
    aside = _aside(path)
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name a file with --output")
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("xb"):
            pass
        aside.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}; name another file with --output") from error


@contextmanager
def staged_file(path):
    """A binary file to write to. It becomes `path` when the block ends well, else it is removed.  Raises OSError naming `path`"""
    path = Path(path)
    aside = _aside(path)
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            aside.replace(path)  # renamed while open: a lock on the file is held to the end
    except OSError as error:
        raise OSError(error.errno or errno.EIO, f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def write_whole(path, content):
    """Write a str (as UTF-8) or bytes to a file, whole or not at all.  Raises OSError naming it"""
    with staged_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path, content, indent=2, ensure_ascii=False):
    """Write JSON to a file, whole or not at all.  ensure_ascii: for text that may not be Unicode, such as a command line"""
    write_whole(path, json.dumps(content, indent=indent, ensure_ascii=ensure_ascii) + "\n")


@contextmanager
def staged_folder(folder):
    """A folder to write into. It becomes `folder` when the block ends well, else it is removed.

    Raises ValueError if `folder` already holds something, OSError naming `folder` if it cannot be written.
    """
    folder = Path(folder).resolve()
    check_is_free(folder)
    staging = _aside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        for path in (*staging.iterdir(), staging):
            _flush(path)
        os.replace(staging, folder)
        _flush(folder.parent)
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO, f"cannot write {folder} ({error.strerror or error}); nothing half-written is left"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_is_free(folder):
    """ValueError unless `folder` is absent, or an empty folder that can be replaced."""
    folder = Path(folder)
    if folder.is_dir():
        if folder.samefile(Path.cwd()) or os.path.ismount(folder):
            where = "a mount point" if os.path.ismount(folder) else "the folder you are in"
            raise ValueError(f"{folder} is {where}, which a finished folder cannot replace: name a new one inside it")
        inside = sorted(path.name for path in folder.iterdir())
        if inside:
            raise ValueError(f"{folder} already holds {inside[0]}{', ...' * (len(inside) > 1)}: name a new folder")
    elif folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} is a file: name a new folder")


def _flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path):
    return path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
