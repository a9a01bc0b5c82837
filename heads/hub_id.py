"""OWNER/NAME@REVISION: a repository of the Hub, and of its branches, tags and commits the one to read. No torch."""


def split_revision(name):
    """(repository, revision), the latter None where `name` has none and main counts.

    No repository's name holds an @. Raises ValueError for one without anything on one of its sides.
    """
    repo_id, at, revision = str(name).partition("@")
    if at and not (repo_id and revision):
        raise ValueError(f"{str(name)!r} is no OWNER/NAME@REVISION: something is missing beside the @")
    return repo_id, revision or None
