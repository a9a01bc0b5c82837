"""How the commands of heads.export end when they are interrupted, and when nobody reads what they print."""

import os
import signal
import sys
import threading
from contextlib import contextmanager


def say(text):
    """Print a line. A reader that has left ends no work, nor does a full disk that stdout leads to."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # nothing more comes through, at the exit neither


@contextmanager
def ending_cleanly(name):
    """Ctrl-C and SIGTERM end the block with what it has staged removed, one line and the status of shells.  name: the command's"""

    def stop(number, frame):
        raise SystemExit(128 + number)

    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if on_main else None
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted; nothing half-written is left", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, before)
