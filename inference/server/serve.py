"""Run the server: a socket, uvicorn, signals, and the line that says that it is ready.

    with listening_socket("127.0.0.1", 8000) as socket, EngineProcess(build) as engine:
        engine.wait_until_built()
        serve(engine, tokenizer, ServerOptions(), socket, ready=print)

The first SIGTERM (or Ctrl-C) stops accepting and lets requests end for --shutdown-timeout seconds, then aborts them; a second one
aborts them now. Aborted requests are told.
"""

import asyncio
import socket
import ssl

import uvicorn

from ..frozen_heap import frozen_heap
from .app import make_app
from .door.connections import connection_class
from .door.unix_socket import remove_socket
from .driver.engine_client import STOPPED
from .service import Service

LAST_WORDS = 2.0  # seconds for aborted requests to be told


def listening_socket(host, port):
    """A bound socket, before the model is loaded, so that a port in use is found at once. Raises OSError."""
    (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # With its protocol named: asyncio sets TCP_NODELAY only then, and without it every second small write waits for 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return bound


def serve(engine, tokenizer, options, bound, ready=None):
    """Serve until a signal.  -> the exit status

    engine: an EngineProcess whose engine is built; ready(url): called, also with unix:PATH, once requests are taken
    """
    service = Service(engine, tokenizer, options)
    try:
        with frozen_heap():
            Server(service, bound, ready).run(sockets=[bound])
    finally:
        service.stop()
        if options.uds is not None:
            remove_socket(options.uds)
    return 1 if service.client.failure not in (None, STOPPED) else 0


class Server(uvicorn.Server):
    """uvicorn's server with an end that tells every request."""

    def __init__(self, service, bound, ready=None):
        options = service.options
        config = uvicorn.Config(
            make_app(service),
            http=connection_class(options),
            log_level=options.log_level,
            access_log=options.access_log == "text",
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            ws="none",
        )
        super().__init__(config)
        self._service, self._ready, self._bound = service, ready, bound
        self._loop = None

    async def startup(self, sockets=None):
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and self._ready:
            self._ready(self._address())

    def _address(self):
        """Where the server listens, as a URL."""
        name = self._bound.getsockname()
        if isinstance(name, str):
            return f"unix:{name}"
        (host, port), scheme = name[:2], "http" if self._service.options.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def handle_exit(self, sig, frame):
        """A signal. It is not raised again at the end: the server ends by itself, with status 0."""
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._abort)
        self.should_exit = True

    async def shutdown(self, sockets=None):
        timer = self._loop.call_later(self._service.options.shutdown_timeout, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def stop(self):
        """End as on a signal; any thread may."""
        self.handle_exit(None, None)

    def _abort(self):
        self._service.client.abort()
        self._loop.call_later(LAST_WORDS, self._force)

    def _force(self):
        self.force_exit = True
