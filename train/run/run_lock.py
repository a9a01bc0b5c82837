"""One training at a time writes into a run folder.

The lock is on the folder itself and belongs to the process, so it goes with it, however that ends. Only the main rank takes it. A
file system that knows no locks is taken as it is.
"""

import fcntl
import os
import time

PATIENCE = 30.0  # seconds: processes whose launcher was killed save before they leave
PAUSE = 0.1

_held = {}  # (device, inode) -> descriptor


def claim(folder):
    """Take the folder for this process, if it is there. Returns False where another process has it and keeps it for PATIENCE."""
    if not os.path.isdir(folder):
        return True
    found = os.stat(folder)
    key = found.st_dev, found.st_ino
    if key in _held:
        return True
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(PAUSE)
                continue
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            return True
        _held[key] = descriptor
        return True


def release(folder):
    """Leave the folder to others; processes forked off meanwhile have no hold on it either."""
    if not os.path.isdir(folder):
        return
    found = os.stat(folder)
    descriptor = _held.pop((found.st_dev, found.st_ino), None)
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
