"""Connections with a limit: to their number, and to the time in which the header of a request comes in.

uvicorn does not limit the time of a header, and tells connections beyond its limit in words of its own. Its protocol is used as it
is, with h11 or httptools, and watched from outside.
"""

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..errors import ApiError
from ..guard import OPEN

SPARE = 64  # connections beyond --max-connections that are still told so; others are closed unread


def connection_class(options):
    """uvicorn's protocol of a connection, with the limits of ServerOptions."""

    class Connection(AutoHTTPProtocol):
        def connection_made(self, transport):
            self._deadline = None
            super().connection_made(transport)
            if len(self.connections) > options.max_connections + SPARE:
                transport.abort()
                return
            if len(self.connections) > options.max_connections:
                self.app = _full(self.app, options.max_connections)
            self._await_header()

        def data_received(self, data):
            if self._deadline is None and not self._answers:
                self._await_header()
            super().data_received(data)
            if self._answers:
                self._stop_waiting()

        def connection_lost(self, error):
            self._stop_waiting()
            super().connection_lost(error)

        @property
        def _answers(self):
            """Whether the header of a request has come that is not answered yet."""
            return self.cycle is not None and not self.cycle.response_complete

        def _await_header(self):
            self._deadline = self.loop.call_later(options.header_timeout, self.transport.close)

        def _stop_waiting(self):
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Connection


def _full(app, most):
    """An app that says that too many connections are open; whether the server lives is still told."""

    async def answer(scope, receive, send):
        if scope["path"] in OPEN:
            await app(scope, receive, send)
            return
        words = f"more than {most} connections are open (--max-connections): try again later"
        headers = {"Connection": "close", "Retry-After": "1"}
        refusal = ApiError(503, words, code="too_many_connections", headers=headers)
        await refusal.response()(scope, receive, send)

    return answer
