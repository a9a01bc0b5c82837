"""Messages over a socket: in pieces, several at once, longer than any buffer, and the end of the other side."""

import socket
import threading

import pytest

from headstart.inference.server.driver.wire import READ, Closed, Wire, packed


@pytest.fixture
def both():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Wire(theirs)


def test_a_message_in_pieces_is_received_when_it_is_whole(both):
    ours, wire = both
    data = packed([1, "x"]) + packed("second")
    for place in range(len(packed([1, "x"])) - 1):
        ours.send(data[place : place + 1])
        assert wire.receive(wait=False) == []
    ours.send(data[place + 1 :])
    assert wire.receive(wait=False) == [[1, "x"], "second"]
    assert wire.receive(wait=False) == []


def test_a_long_message_waits_for_its_reader(both):
    ours, wire = both
    message = bytes(range(256)) * (3 * READ // 256)
    sender = threading.Thread(target=ours.sendall, args=(packed(message) * 2,))
    sender.start()
    received = []
    while len(received) < 2:
        received += wire.receive(wait=True)
    assert received == [message] * 2
    sender.join()


def test_the_last_words_are_received_before_the_end_is_told(both):
    ours, wire = both
    ours.sendall(packed("why") + packed("half")[:-1])
    ours.close()
    assert wire.receive(wait=True) == ["why"]
    with pytest.raises(Closed):
        wire.receive(wait=True)


def test_the_end_of_the_other_side_is_told(both):
    ours, wire = both
    ours.close()
    with pytest.raises(Closed):
        wire.receive(wait=True)
    with pytest.raises(Closed):
        wire.send("x")
