"""Lock a run folder, so that only one training at a time writes into it.

The lock is on the folder itself and belongs to the process, so it ends with the process in every case. Only the main rank takes it.
On a file system without locks there is no protection.
"""

import fcntl
import os
import time

PATIENCE = 30.0  # seconds: processes whose launcher was killed save before they leave
PAUSE = 0.1

_held = {}  # (device, inode) -> descriptor


def claim(folder):
    """Lock the folder, if it exists, for this process. Returns False if another process holds the lock for all of PATIENCE."""
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
    """Release the folder's lock, also for processes forked in the meantime."""
    if not os.path.isdir(folder):
        return
    found = os.stat(folder)
    descriptor = _held.pop((found.st_dev, found.st_ino), None)
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
