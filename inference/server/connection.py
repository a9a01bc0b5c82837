"""One client's connection: its body with limits, and the moment it leaves. No torch."""

import asyncio
import contextlib

from starlette.responses import Response

from .errors import ApiError


class ClientLeft(Exception):
    """Nobody waits for the answer."""


async def read_body(request, options):
    """The body of a Starlette request. ApiError 413 beyond the limit, as soon as that is known, and 408 if it comes too slowly."""
    most = options.max_body_bytes
    too_large = ApiError(
        413, f"the body has more than {most} bytes (--max-body-bytes)", headers={"Connection": "close"}
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(options.body_timeout):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                body += message.get("body", b"")
                if len(body) > most:
                    raise too_large
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        words = f"the body took more than {options.body_timeout:g} seconds (--body-timeout)"
        raise ApiError(408, words, headers={"Connection": "close"}) from None


async def unless_client_leaves(receive, work):
    """What `work`, a coroutine or future, returns or raises; cancelled, and ClientLeft raised, as soon as the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _left(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from an async generator of bytes, which is closed at once when the client leaves or reads too slowly."""

    media_type = "text/event-stream"

    def __init__(self, pieces, write_timeout, close):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces, self._write_timeout, self._close = pieces, write_timeout, close

    async def __call__(self, scope, receive, send):
        try:
            with contextlib.suppress(ClientLeft):
                await unless_client_leaves(receive, self._write(send))
        finally:
            self._close()

    async def _write(self, send):
        async def sent(message):
            try:
                async with asyncio.timeout(self._write_timeout):
                    await send(message)
            except (TimeoutError, OSError):
                raise ClientLeft from None

        await sent({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await sent({"type": "http.response.body", "body": piece, "more_body": True})
        await sent({"type": "http.response.body", "body": b""})
