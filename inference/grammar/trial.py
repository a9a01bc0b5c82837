"""Try grammars in a process of their own, which may run out of time, memory or stack in our place. No torch.

trial = Trial(tokenizer_text, vocab_size, eos_token_ids)
grammar = trial(params)          # a Grammar, or ValueError in one line
"""

import json
import os
import selectors
import subprocess
import sys
import threading
from pathlib import Path

from .library import Grammar, library
from .trial_process import CPU_SECONDS

SECONDS = 30  # for an answer, on a machine that is busy
PARENT = Path(__file__).resolve().parents[3]  # of the package


class Trial:
    """Started with the first grammar, and again after one that killed it. Any thread may call it; it tries one at a time."""

    def __init__(self, *tokenizer):
        self._tokenizer, self._process, self._lock = tokenizer, None, threading.Lock()

    def __call__(self, params):
        """params: StructuredOutputsParams"""
        value, kind = getattr(params, params.kind), params.kind
        asked = [kind, value, params.whitespace_pattern, not params.disable_any_whitespace]
        with self._lock:
            try:
                told = self._start() or self._ask(asked)
            except BaseException:  # an interrupt: its answer would be taken for the next one's
                self._end()
                raise
        if "error" in told:
            raise ValueError(f"structured_outputs {kind} cannot be followed: {told['error']}")
        return Grammar(*told["grammar"])

    def __del__(self):
        self.close()

    def close(self):
        """End the process. A grammar that another thread tries is refused, and no pipe is closed that it waits for."""
        while not self._lock.acquire(timeout=0.02):
            if (process := self._process) is not None:
                process.kill()
        try:
            self._end()
        finally:
            self._lock.release()

    def _end(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self):
        """Start the process where there is none.  -> None, or what is wrong"""
        if self._process is not None:
            return None
        library()  # says how to get it
        path = os.pathsep.join([str(PARENT), *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.trial_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is not for it
        )
        told = self._ask(self._tokenizer)
        return None if not told else {"error": "the library cannot read this model's tokenizer"}

    def _ask(self, message):
        process = self._process
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._end()
            return {"error": "it broke the process that tries grammars"}
        # One line comes for each, so nothing is left in the buffer when the next one is waited for.
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            ready = waiting.select(SECONDS)
        line = process.stdout.readline() if ready else b""
        if line.endswith(b"\n"):
            return json.loads(line)
        self._end()
        return {
            "error": f"compiling it takes more than {CPU_SECONDS} seconds, or too much memory, or it is nested too deeply"
        }
