"""HTTP client of a load generator: every request has a connection of its own, and events are handed over as they come.

h11, which uvicorn brings along, parses what asyncio reads. 10,000 events a second, each of which comes by itself, take half of one
core of an EPYC with their JSON, on 16 streams as on 256. Not done here: redirects, compression, connections that are used again.
"""

import asyncio
import json
import ssl
from urllib.parse import urlsplit

import h11

READ = 2**16  # bytes


class HttpError(Exception):
    """An answer other than 200.  status: its number"""

    def __init__(self, status, body):
        super().__init__(f"{status}: {_message(body)}")
        self.status = status


class Client:
    """base_url: http://HOST:PORT, or https, with or without /v1 at the end; api_key: sent with every request, None: none."""

    def __init__(self, base_url, api_key=None):
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"--base-url must be like http://127.0.0.1:8000, got {base_url!r}")
        self.host, self._path = parts.hostname, parts.path.rstrip("/").removesuffix("/v1")
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = [("Host", parts.netloc.rpartition("@")[2]), ("Connection", "close")]
        if api_key:
            self._headers.append(("Authorization", f"Bearer {api_key}"))

    async def ask(self, method, path, body=None):
        """The body of a whole answer, as bytes. Raises HttpError, and OSError if the server cannot be reached or breaks off."""
        return b"".join([data async for data in self._data(method, path, body)])

    async def events(self, path, body):
        """Yield the events of a stream, as lists of bytes: those that came together. Raises as `ask`."""
        rest = b""
        async for data in self._data("POST", path, body):
            *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            found = [event[5:].strip() for event in whole if event.startswith(b"data:")]
            if found:
                yield found

    async def _data(self, method, path, body):
        """Yield pieces of the body of an answer, as they come."""
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self._tls)
        status, refusal = None, b""
        try:
            connection = h11.Connection(h11.CLIENT)
            content = b"" if body is None else json.dumps(body).encode()
            headers = [*self._headers, ("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
            request = h11.Request(method=method, target=self._path + path, headers=headers)
            sent = [request, h11.Data(data=content), h11.EndOfMessage()]
            writer.write(b"".join(map(connection.send, sent)))
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(READ))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status == 200:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    refusal += event.data
            if status != 200:
                raise HttpError(status, refusal)
        except h11.RemoteProtocolError as error:
            when = "before an answer" if status is None else "within the answer"
            raise ConnectionResetError(f"the connection broke off {when}: {error}") from None
        finally:
            writer.close()


def _message(body):
    """The words of an error's body."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:200]
