"""What a head, a target or an adapter is called by: a folder, or OWNER/NAME@REVISION on the Hub. No torch."""

import difflib
from pathlib import Path


def split_revision(name):
    """(repository, revision: a branch, tag or commit), the latter None where `name` has none and main counts.

    No repository's name holds an @. Raises ValueError for one without anything on one of its sides.
    """
    repo_id, at, revision = str(name).partition("@")
    if at and not (repo_id and revision):
        raise ValueError(f"{str(name)!r} is no OWNER/NAME@REVISION: something is missing beside the @")
    return repo_id, revision or None


def check_may_be_id(name):
    """ValueError for what is no folder and can be no Hub id either: a file, or a path that leads nowhere."""
    name = str(name)
    if Path(name).is_file():
        raise ValueError(f"{name} is a file: name the folder that it lies in")
    if name.startswith((".", "/", "~")) or name.partition("@")[0].count("/") > 1:
        raise ValueError(f"there is no folder {name}{near_folder(name)}")


def near_folder(name):
    """For an error about a folder that is not there: " (did you mean ...?)" if one beside it is called nearly so, else ""."""
    try:
        path = Path(name).expanduser()
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except (OSError, RuntimeError):  # not there either, or not to be read; no such user
        return ""
    nearest = difflib.get_close_matches(path.name, beside, n=1)
    return f" (did you mean {str(path.with_name(nearest[0]))!r}?)" if nearest else ""
