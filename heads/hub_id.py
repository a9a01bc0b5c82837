"""OWNER/NAME@REVISION: a repository of the Hub, and of its branches, tags and commits the one to read. No torch."""

from pathlib import Path


def split_revision(name):
    """(repository, revision), the latter None where `name` has none and main counts.

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
        raise ValueError(f"there is no folder {name}")
