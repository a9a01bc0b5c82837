"""A server in this process on a free port of loopback, driven over real sockets."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

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
    options = ServerOptions(port=0, served_model_names=(NAME,), log_level="error", **options)
    service, bound, urls = Service(llm, options), bound or listening_socket(options.host, 0), []
    started = threading.Event()

    def ready(url):
        urls.append(url)
        started.set()

    server = Server(service, bound, ready)
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield Running(llm, service, server, bound, urls[0])
    finally:
        server.stop()
        server.stop()
        thread.join(20)
        assert service.client.stop()
        assert not thread.is_alive()
