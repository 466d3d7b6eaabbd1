"""A link over a socket brings all messages in their order, however slowly the other end reads."""

from __future__ import annotations

import socket
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from oaiserve.process.link import SocketLink
from oaiserve.process.messages import Abort, Ended, ToEngine, ToFront
from oaiserve.process.plain_data import decoder
from oaiserve.runtime import THREADS

TIMEOUT_SECONDS = 60


class End:
    """One end of a link, with what has come."""

    def __init__(self, sock: socket.socket, kind: Any, name: str, taking: Callable[[Any], object]) -> None:
        self.received: SimpleQueue[Any] = SimpleQueue()
        self.link = SocketLink(sock, decoder(kind), name, THREADS)
        self._taking = taking
        self.link.start(self._take, lambda: self.received.put(None))

    def _take(self, message: Any) -> None:
        self._taking(message)
        self.received.put(message)

    def next(self) -> Any:
        return self.received.get(timeout=TIMEOUT_SECONDS)


def pair(taking: Callable[[Any], object] = lambda message: None) -> tuple[End, End]:
    first, second = socket.socketpair()
    for each in (first, second):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return End(first, ToFront, "front", lambda message: None), End(second, ToEngine, "engine", taking)


def test_messages_come_in_their_order_also_those_that_wait_and_a_large_one() -> None:
    gate: SimpleQueue[None] = SimpleQueue()
    front, engine = pair(lambda message: gate.get(timeout=TIMEOUT_SECONDS) if message.request_id == "0" else None)
    ids = [*map(str, range(500)), "x" * 2**22, "last"]
    for request_id in ids:
        front.link.send(Abort(request_id))
    gate.put(None)
    assert [engine.next().request_id for _ in ids] == ids
    front.link.close()
    assert engine.next() is None
    front.link.join()
    engine.link.join()


def test_what_was_sent_before_the_close_arrives() -> None:
    front, engine = pair()
    for number in range(300):
        engine.link.send(Ended(f"{number} {'x' * 1000}"))
    engine.link.close()
    assert [int(front.next().reason.split()[0]) for _ in range(300)] == [*range(300)]
    assert front.next() is None
    front.link.join()
    engine.link.join()


def test_bytes_that_are_no_message_end_the_link() -> None:
    first, second = socket.socketpair()
    front = End(first, ToFront, "front", lambda message: None)
    second.sendall(b"\x01\x00\x00\x00\xc1")
    assert front.next() is None
    front.link.join()
    second.close()
