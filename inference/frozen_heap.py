"""The garbage collector without the objects that were there before: a pause of a long run becomes short.

Python walks every object of a process, a few hundred thousand once transformers is imported, when enough new ones have lived for a
while. One walk was seen to take 0.24 seconds, and every output of the batch waits for it. Streams are read piece by piece and run
without this: a server freezes its heap once, by itself.
"""

import atexit
import gc
import time
from contextlib import contextmanager

INTERVAL = 60  # seconds after which a full collection is due
_outermost = {}  # {0: mark of the outermost context}: taken by setdefault, which no other thread and no interrupt divides
_last_full = time.monotonic()
_looks_again = 0.0  # when: the program's heap was seen frozen, and counting walks it, 15 ms for 800,000 objects


@contextmanager
def frozen_heap():
    """Inside this context no collection walks what existed before it; afterwards full ones do.

    Freezing makes all objects old and sets the collector's counters back, so in a loop of short calls nothing would be collected
    any more. So young garbage goes first, and a full collection follows once INTERVAL has passed since the last one. Nothing
    happens inside another such context, of any thread, or where the program has frozen its heap or disabled the collector.
    """
    mine = object()
    try:
        if _outermost.setdefault(0, mine) is not mine or not gc.isenabled() or _program_froze():
            yield
            return
        try:
            gc.collect(1)
            gc.freeze()
            yield
        finally:
            gc.unfreeze()
            _collect_if_due()
    finally:
        if 0 in _outermost and _outermost[0] is mine:  # not get: an interrupt may come after a call
            del _outermost[0]


def end_without_collecting():
    """Let this process end, when it does, without walking its objects: with transformers imported that takes a second or more."""
    atexit.register(gc.freeze)


def _program_froze():
    """Whether the heap is frozen, as it was seen in the last INTERVAL."""
    global _looks_again
    if time.monotonic() < _looks_again:
        return True
    if not gc.get_freeze_count():
        return False
    _looks_again = time.monotonic() + INTERVAL
    return True


def _collect_if_due():
    global _last_full
    if time.monotonic() - _last_full > INTERVAL:
        gc.collect()
        _last_full = time.monotonic()
