"""Messages over a stream socket between two processes of ours: the length in 8 bytes, then a pickle. No torch.

The engine's side blocks, and takes all that has come in one read; the HTTP side awaits (read_message).
"""

import pickle
import socket
import struct

LENGTH = struct.Struct("<Q")
READ = 2**18  # bytes per read


class Closed(Exception):
    """The other side has closed its end, or its process has ended."""


def packed(message):
    """The bytes of a message."""
    data = pickle.dumps(message, 5)
    return LENGTH.pack(len(data)) + data


async def read_message(reader):
    """The next message of an asyncio.StreamReader. Raises Closed."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (EOFError, ConnectionError):
        raise Closed from None


class Wire:
    """The blocking side.  connection: a connected stream socket"""

    def __init__(self, connection):
        self._connection, self._unread = connection, bytearray()

    def send(self, message):
        """Send one message, however long the other side takes to read it. Raises Closed."""
        try:
            self._connection.sendall(packed(message))
        except ConnectionError:
            raise Closed from None

    def receive(self, wait):
        """All messages that have come since the last call; wait: for the first of them. Raises Closed."""
        messages = []
        while True:
            try:
                data = self._connection.recv(READ, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError:
                data = b""
            if not data:
                if messages:  # such as why an engine could not be built; the next call tells the end
                    return messages
                raise Closed
            self._unread += data
            messages += self._whole_ones()

    def close(self):
        self._connection.close()

    def _whole_ones(self):
        """The messages of which every byte has come; they leave the buffer."""
        start, messages, unread = 0, [], self._unread
        while len(unread) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(unread, start)
            end = start + LENGTH.size + length
            if len(unread) < end:
                break
            messages.append(pickle.loads(memoryview(unread)[start + LENGTH.size : end]))
            start = end
        del unread[:start]
        return messages
