"""A Unix socket to listen on, and the limit of open files."""

import contextlib
import os
import resource
import socket
from pathlib import Path

OPEN_FILES = 65536


def unix_socket(path, for_all):
    """A socket that listens. One that a server left behind is replaced. Raises ValueError.

    for_all: whether other users of the machine may connect, as where a key is asked for; else the owner only.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        bound.bind(path)
        os.chmod(path, 0o666 if for_all else 0o600)  # nobody can connect before the socket listens
        bound.listen()  # clients wait while the model is loaded, and another server does not take this for one left behind
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return bound


def remove_socket(path):
    """Remove the file of a Unix socket; it may be gone."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _is_left_behind(path):
    """Whether this is a socket that nobody listens on."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def allow_open_files():
    """Raise this process's limit of open files, and with it that of connections, as far as it may. Its children take it over."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
