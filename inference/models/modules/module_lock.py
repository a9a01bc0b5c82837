"""One pass at a time over a module: several decoders may share one, each driven by a thread of its own.

A pass sets attributes of the module and of its config, and puts them back. Replayed CUDA graphs do not run the module.
"""

import functools
import threading
import weakref

_locks, _guard = weakref.WeakKeyDictionary(), threading.Lock()


def lock_of(module):
    """The lock of a module, the same for all decoders on it; a thread may take it again."""
    with _guard:
        return _locks.setdefault(module, threading.RLock())


def one_at_a_time(method):
    """The method of an object with a `module`, run by one thread at a time for each module."""

    @functools.wraps(method)
    def alone(self, *args, **kwargs):
        with lock_of(self.module):
            return method(self, *args, **kwargs)

    return alone
