"""A server in this process on a free port of loopback, driven over real sockets.

`running` runs the engine's loop in a thread, over the same connection as to a process: its LLM can be looked at, and servers on
shared weights start at once. test_processes.py has servers as they are run, in processes.
"""

import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from headstart.inference.server.driver.engine_info import EngineInfo
from headstart.inference.server.driver.engine_loop import EngineLoop
from headstart.inference.server.driver.wire import Wire
from headstart.inference.server.options import ServerOptions
from headstart.inference.server.serve import Server, listening_socket
from headstart.inference.server.service import Service

ASSETS = Path(__file__).resolve().parents[3] / "assets"
TARGET, HEADS = ASSETS / "stdlib-coder", ASSETS / "stdlib-coder-medusa"
NAME = "coder"
PROMPTS = [
    "Write the Python function `count_words`: Count the words of a text.",
    "def read_lines(path):\n",
    "import os\n\ndef join",
    "class Stack:\n    def push(self, item):\n",
]
LONG = {"prompt": PROMPTS[1], "temperature": 1.0, "max_tokens": 1800, "ignore_eos": True, "seed": 1}


class EngineInThread:
    """What a server needs of an EngineProcess."""

    exit_status = None

    def __init__(self, llm):
        self.info = EngineInfo.of(llm)
        self.connection, theirs = socket.socketpair()
        self._thread = threading.Thread(target=EngineLoop(llm.session, Wire(theirs)).run, daemon=True)
        self._thread.start()

    def wait(self, seconds):
        self._thread.join(seconds)

    def stop(self):
        """End the loop.  -> whether it has ended"""
        self.connection.close()
        self._thread.join(10)
        return not self._thread.is_alive()


class Running:
    """A server that answers at `url`."""

    def __init__(self, llm, service, server, bound, url):
        self.llm, self.service, self.server, self.bound, self.url = llm, service, server, bound, url
        self.port = None if url.startswith("unix:") else int(url.rsplit(":", 1)[1])

    def wait_until_idle(self, seconds=10):
        """Every seat and page is free again, and no request is left."""
        end = time.monotonic() + seconds
        engine = self.llm.engine
        while engine.scheduler.has_unfinished or self.llm.session._calls or self.service.client.num_outputs:
            assert time.monotonic() < end, "requests are left"
            time.sleep(0.01)
        engine.check()
        assert engine.num_free_pages == engine.scheduler.num_pages
        assert not self.service.client._jobs

    def wait_for(self, count, seconds=10):
        """Until this many outputs are in the engine."""
        end = time.monotonic() + seconds
        scheduler = self.llm.engine.scheduler
        while len(scheduler.active) + len(scheduler.waiting) < count:
            assert time.monotonic() < end, f"{count} outputs never came"
            time.sleep(0.005)


@contextmanager
def running(llm, bound=None, **options):
    """A Running server of an LLM.  bound: a socket, None: a free port"""
    engine = EngineInThread(llm)
    try:
        with serving(engine, llm.tokenizer, bound, **options) as server:
            yield Running(llm, *server)
    finally:
        assert engine.stop()


@contextmanager
def serving(engine, tokenizer, bound=None, **options):
    """A server of an engine.  -> its Service, its Server, its socket, its URL"""
    options = ServerOptions(port=0, served_model_names=(NAME,), log_level="error", **options)
    service, bound, urls = Service(engine, tokenizer, options), bound or listening_socket(options.host, 0), []
    started = threading.Event()

    def ready(url):
        urls.append(url)
        started.set()

    server = Server(service, bound, ready)
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield service, server, bound, urls[0]
    finally:
        server.stop()
        server.stop()
        thread.join(20)
        service.stop()
        assert not thread.is_alive()
