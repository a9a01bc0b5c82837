"""Names of heads, targets and adapters: a folder, or OWNER/NAME@REVISION on the Hub. No torch."""

import difflib
from pathlib import Path


def split_revision(name):
    """(repository, revision). The revision is a branch, tag or commit, or None, which means main.

    A repository's name holds no @. Raises ValueError if one side of the @ is empty.
    """
    repo_id, at, revision = str(name).partition("@")
    if at and not (repo_id and revision):
        raise ValueError(f"{str(name)!r} is not OWNER/NAME@REVISION: one side of the @ is empty")
    return repo_id, revision or None


def check_may_be_id(name):
    """ValueError for a name that is neither a folder nor a possible Hub id: a file, or a path that leads nowhere."""
    name = str(name)
    if Path(name).is_file():
        raise ValueError(f"{name} is a file: name the folder that it lies in")
    if name.startswith((".", "/", "~")) or name.partition("@")[0].count("/") > 1:
        raise ValueError(f"there is no folder {name}{near_folder(name)}: give a folder, or OWNER/NAME on the Hub")


def near_folder(name):
    """For an error about a missing folder: " (did you mean ...?)" if a folder beside it has a similar name, else ""."""
    try:
        path = Path(name).expanduser()
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except (OSError, RuntimeError):  # its parent is missing or unreadable, or ~user is unknown
        return ""
    nearest = difflib.get_close_matches(path.name, beside, n=1)
    return f" (did you mean {str(path.with_name(nearest[0]))!r}?)" if nearest else ""
