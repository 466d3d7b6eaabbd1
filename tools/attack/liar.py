"""A replica that lies, behind a gateway that is attacked: its reports, lists and answers are what the attack says.

Only requests with the attacker's key are answered with lies. All others are refused as by a full server, so that a
gateway sends them to the sound one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from tools.attack.attack import ATTACKER_KEY

Content = bytes | Callable[[], Iterable[bytes]]
MOST_SENT_BYTES = 2**30  # bytes of one answer without an end

FULL = b"HTTP/1.1 429 Full\r\ncontent-length: 2\r\nretry-after: 1\r\n\r\n{}"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
UNKNOWN = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
NOT_READY = b"HTTP/1.1 503 Not ready\r\ncontent-length: 0\r\n\r\n"


class Liar:
    """Its `url` is there while it listens. The rest is what it answers: bytes, or what makes the parts of an answer."""

    def __init__(self) -> None:
        self.url = ""
        self.is_ready = True
        self.report: Content = UNKNOWN
        self.answer: Content = FULL
        self.num_answers = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
            yield

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError), connection.makefile("rb") as reader:
            while head := reader.readline():
                length = 0
                is_attacker = False
                while (line := reader.readline()).strip():
                    name, _, value = line.strip().partition(b": ")
                    length = int(value) if name == b"content-length" else length
                    is_attacker |= value.endswith(ATTACKER_KEY.encode())
                reader.read(length)
                self._send(connection, self._content_for(head.split(b" ")[1], is_attacker))

    def _content_for(self, path: bytes, is_attacker: bool) -> Content:
        if path in (b"/ready", b"/health"):
            return EMPTY if self.is_ready else NOT_READY
        if path == b"/debug/report":
            return self.report if self.is_ready else NOT_READY
        if not is_attacker:
            return FULL
        self.num_answers += 1
        return self.answer

    def _send(self, connection: socket.socket, content: Content) -> None:
        num_bytes = 0
        for part in (content,) if isinstance(content, bytes) else content():
            connection.sendall(part)
            num_bytes += len(part)
            if num_bytes > MOST_SENT_BYTES:
                raise OSError("the gateway takes whatever it gets")


LIAR = Liar()  # It is behind the gateway of tools.attack.server, and attacks set what it answers.
