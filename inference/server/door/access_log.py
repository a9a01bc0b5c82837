"""One JSON line per request, on stdout or in a file. It holds no text of a prompt or an answer.

    time, request_id, client, method, path (without its query), status, seconds, first_seconds (to the first piece of the body),
    bytes (of the body), complete (false for an answer that broke off), and of answers prompt_tokens, completion_tokens

A thread writes, so a reader that stands still stops nobody: lines that it does not take are dropped and counted. A full disk or a
reader that has left costs the lines alone. The file is opened anew for every write, so it may be moved away at any time.
"""

import json
import logging
import os
import queue
import threading
import time
from datetime import UTC, datetime

log = logging.getLogger("headstart.server")
STDOUT = 1
MOST_WAITING = 10_000  # lines
MOST_AT_ONCE = 1000  # lines of one write: else many that come without a pause are taken for ever, and none is written
LAST = 2.0  # seconds for the last lines to be written
MOST_PATH = 200  # characters


class AccessLog:
    """ASGI middleware around all others.  path: a file, None: stdout"""

    def __init__(self, app, path=None):
        self._app, self._lines = app, LineWriter(path)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            self._lines.close()  # a lifespan is as long as the server's
            return
        start, state = time.monotonic(), scope.setdefault("state", {})
        told = {"status": None, "seconds": None, "first_seconds": None, "bytes": 0, "complete": False}

        async def counted(message):
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
            elif body := message.get("body"):
                told["bytes"] += len(body)
                if told["first_seconds"] is None:
                    told["first_seconds"] = round(time.monotonic() - start, 6)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                told["complete"] = True

        try:
            await self._app(scope, receive, counted)
        finally:
            told["seconds"] = round(time.monotonic() - start, 6)
            told["complete"] &= not getattr(state.get("counts"), "broken", False)
            self._lines.write(json.dumps(_about(scope, state) | told | _tokens(state), separators=(",", ":")))


def _about(scope, state):
    """What a request was."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": state.get("request_name"),
        "client": (scope.get("client") or [None])[0],
        "method": scope["method"],
        "path": scope["path"][:MOST_PATH],
    }


def _tokens(state):
    """The tokens of an answer (answer.py), if the request asked for one."""
    counts = state.get("counts")
    return {} if counts is None else {"prompt_tokens": counts.prompt, "completion_tokens": counts.completion}


class LineWriter:
    """Appends lines in a thread of its own.  path: a file, None: stdout"""

    def __init__(self, path=None):
        self._path, self._waiting = path, queue.Queue(MOST_WAITING)
        self.num_lost = 0
        self._failing = False  # whether the last write failed, perhaps within a line
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
        self._thread.start()

    def write(self, line):
        """Hand over a line; never waits."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.num_lost += 1

    def close(self):
        """Write what waits, for a while."""
        try:
            self._waiting.put(None, timeout=LAST)
        except queue.Full:
            return
        self._thread.join(LAST)

    def _run(self):
        ended = False
        while not ended:
            lines = [self._waiting.get()]
            while len(lines) < MOST_AT_ONCE and not self._waiting.empty():
                lines.append(self._waiting.get_nowait())
            ended = None in lines
            lines = [line for line in lines if line is not None]
            if not lines:
                continue
            try:
                self._append(("\n" * self._failing + "\n".join(lines) + "\n").encode())
                if self._failing:
                    log.warning("the access log is written again; %d lines are missing", self.num_lost)
                self._failing, self.num_lost = False, 0
            except OSError as error:
                self.num_lost += len(lines)
                if not self._failing:
                    log.warning("the access log cannot be written: %s", error.strerror)
                self._failing = True

    def _append(self, data):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        target = STDOUT if self._path is None else os.open(self._path, flags, 0o640)
        try:
            while data:
                data = data[os.write(target, data) :]
        finally:
            if self._path is not None:
                os.close(target)
