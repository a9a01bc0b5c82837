"""The garbage collector without the objects that were there before: a pause of a long run becomes short.

Python walks every object of a process, a few hundred thousand once transformers is imported, when enough new ones have lived for a
while: the log-probabilities of 64 requests are as many after two hundred steps. One walk was seen to take 0.24 seconds, and every
output of the batch waits for it. Streams are read piece by piece and run without this: a server freezes its heap once, by itself.
"""

import atexit
import gc
import threading
import time
from contextlib import contextmanager

INTERVAL = 60  # seconds after which a full collection is due
RARE = 100  # how many times as rarely a call has full collections
_ours = threading.Lock()  # held by the context that has frozen the heap
_last_full = time.monotonic()
_looks_again = 0.0  # when: the program's heap was seen frozen, and counting walks it, 15 ms for 800,000 objects


@contextmanager
def frozen_heap(rarely_full=False):
    """Inside this context no collection walks what existed before it; afterwards full ones do.

    rarely_full: whether objects that came inside and have grown old are walked RARE times as rarely as elsewhere, in the whole
    process. In a call most of them are its outputs: a walk over 100,000 log-probabilities takes 40 ms and finds nothing. A call of
    hours still frees its garbage. (From Python 3.14 on old objects are walked in parts, and this changes nothing.)

    Freezing makes all objects old and sets the collector's counters back, so in a loop of short calls nothing would be collected
    any more. So young garbage goes first, and a full collection follows once INTERVAL has passed since the last one. Nothing
    happens inside another such context, of any thread, or where the program has frozen its heap or disabled the collector.
    """
    is_first = _ours.acquire(blocking=False)
    try:
        if not is_first or not gc.isenabled() or _program_froze():
            yield
            return
        often, seldom, full = gc.get_threshold()
        try:
            gc.collect(1)
            gc.freeze()
            if rarely_full:
                gc.set_threshold(often, seldom, RARE * full)
            yield
        finally:
            gc.set_threshold(often, seldom, full)
            gc.unfreeze()
            _collect_if_due()
    finally:
        if is_first:
            _ours.release()


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
