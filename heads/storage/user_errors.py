"""Errors for users: their words, and how a command ends on one. No torch."""

import argparse
import contextlib
import os
import signal
import sys
import threading


def list_names(names, most=8):
    """The first few of many names, sorted, and the number of the rest."""
    names = sorted(map(str, names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "no tensors"


def exit_status(name, work, failures=(), reader_may_leave=False):
    """Do the work of the command `name` and return its exit status: the result of `work()`, 0 for None.

    Bad input and files that cannot be read or written (ValueError, OSError) end as one line `NAME: error: ...` on stderr and
    status 2. `failures` are exceptions of correctly requested work that broke off: they end as such a line and status 1. Ctrl-C is
    one line and status 130. reader_may_leave: status 0 if the reader of the output leaves early, as `head` does.
    """
    try:
        return work() or 0
    except failures as error:
        tell_error(name, error)
        return 1
    except (ValueError, OSError) as error:
        if reader_may_leave and isinstance(error, BrokenPipeError):
            os._exit(0)
        tell_error(name, error)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


class CommandParser(argparse.ArgumentParser):
    """A parser of a command line, also of its commands, whose errors are one line, and which takes no shortened options.

    source: the file that holds the options, told in errors; None: they were typed
    """

    source = None

    def __init__(self, *given, **options):
        super().__init__(*given, allow_abbrev=False, **options)

    def error(self, message):
        tell_error(self.prog, f"{self.source}: {message}" if self.source else message)
        self.exit(2)


def tell_error(name, error):
    """Print the error as one line on stderr."""
    with contextlib.suppress(OSError):  # stderr may be the pipe that broke
        print(f"{name}: error: {' '.join(reason_of(error).split())}", file=sys.stderr)


def reason_of(error):
    """The words of an error; those of an OSError are its reason and file, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error)


def say(text):
    """Print a line. The work goes on if the reader has left or stdout leads to a full disk."""
    try:
        print(text, flush=True)
    except OSError:  # no further output gets through, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def ending_cleanly(name):
    """On Ctrl-C or SIGTERM, remove the block's staged files, print a line, exit with the shell's status.  name: the command's"""

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
