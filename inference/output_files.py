"""Files that a command will write: whether they can be, asked before the work is done. No torch."""

import tempfile


def check_writable(path):
    """Raise ValueError now, not after minutes of work, if a file cannot be written at `path` (a Path); makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}; name another file with --output") from error
