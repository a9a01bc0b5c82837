"""The server's door, before any route: Host, key, content type, the request's name, and a last answer where a route broke off.

Host names are checked against DNS rebinding: a page of another site, opened in a browser of this machine, could otherwise talk to
a server on loopback. Only application/json is taken, which no form of another site can send without asking first. No torch.
"""

import hashlib
import hmac
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders

from .errors import FAILED, ApiError

OPEN = ("/", "/health", "/ping")  # routes that need no key: the page holds no secret, and asks for one
REQUEST_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
log = logging.getLogger("headstart.server")


class Guard:
    """ASGI middleware around the app.  options: ServerOptions"""

    def __init__(self, app, options):
        self._app, self._hosts = app, options.hosts
        self._keys = [_digest(key) for key in options.api_keys]

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, started, ended = Headers(scope=scope), False, False
        given = headers.get("x-request-id", "")
        name = given if REQUEST_NAME.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_name"] = name

        async def send_named(message):
            nonlocal started, ended
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = name
            elif not message.get("more_body"):
                ended = True
            await send(message)

        if (refusal := self._refusal(scope, headers)) is not None:
            await refusal.response()(scope, receive, send_named)
            return
        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            # The words of an exception may hold a prompt; its place in the code does not.
            place = error.__traceback__
            while place.tb_next:
                place = place.tb_next
            where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
            log.error("%s %s failed: %s at %s", scope["method"], scope["path"], type(error).__name__, where)
            if started and not ended:
                raise RuntimeError("an answer broke off") from None  # so that the connection is closed, not used again
            if not started:
                await ApiError(500, FAILED).response()(scope, receive, send_named)

    def _refusal(self, scope, headers):
        """Why this request is not for any route, as an ApiError, or None."""
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy that believes the other of the two sees another request's start in this one's body.
            words = "give Content-Length or Transfer-Encoding, not both"
            return ApiError(400, words, headers={"Connection": "close"})
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            return ApiError(
                403, "this Host is not served here: start the server with --allowed-hosts", code="host_not_allowed"
            )
        if self._keys and scope["path"] not in OPEN and not self._knows(headers.get("authorization", "")):
            return ApiError(
                401,
                "give the server's key as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if scope["method"] == "POST" and scope["path"] not in OPEN:
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json":
                return ApiError(415, "send JSON with the header `Content-Type: application/json`")
        return None

    def _knows(self, authorization):
        """Whether it is Bearer with one of the keys, in a time that does not tell how much of it is right."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key):
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host(header):
    """The name in a Host header, without its port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]
