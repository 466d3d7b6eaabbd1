"""`Link`: a two-way channel for messages between the front and an engine process, and one over a Unix socket."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, Protocol

import msgspec

from oaiserve.process.frames import Frames, framed
from oaiserve.process.plain_data import encode
from oaiserve.runtime import AT_ONCE, ENDED, Runtime, When, Worker

log = logging.getLogger(__name__)

READ_BYTES = 2**20  # bytes to read at once


class Link(Protocol):
    """One end. Any thread may send."""

    def start(self, received: Callable[[Any], None], closed: Callable[[], None]) -> None:
        """Begin to read. Each message is passed to `received`, and `closed` is called once, after the last one. Neither
        may wait for another message."""

    def send(self, message: object) -> None:
        """Send a message, without waiting. It is lost if the other end is gone."""

    def send_now(self, message: object) -> None:
        """Hand a small message to the system before this returns, so that it arrives even if this process ends, unless
        much is waiting."""

    def close(self) -> None:
        """Send what is waiting, and close this end."""


class SocketLink:
    """One end of a link over a connected stream socket. A thread reads. What the system doesn't take at once is left to
    a second thread, so that no sender waits."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], Any], name: str, runtime: Runtime) -> None:
        """`decode` parses the messages received."""
        self._socket = sock
        self._decode = decode
        self._frames = Frames()
        self._received: Callable[[Any], None] = lambda message: None
        self._closed: Callable[[], None] = lambda: None
        self._lock = Lock()  # guards the next three attributes
        self._unsent: list[bytes] = []
        self._is_writing = False  # The second thread writes.
        self._is_closing = False
        self._reader: Worker[None] = runtime.worker(f"{name}-reads", self._read)
        self._writer: Worker[None] = runtime.worker(f"{name}-writes", self._write)

    def start(self, received: Callable[[Any], None], closed: Callable[[], None]) -> None:
        self._received = received
        self._closed = closed
        self._reader.start()
        self._writer.start()

    def send(self, message: object) -> None:
        data = framed(encode(message))
        with self._lock:
            if not (self._unsent or self._is_writing):
                data = data[self._sent(data) :]
            if not data:
                return
            self._unsent.append(data)
        self._writer.post(None)

    send_now = send

    def close(self) -> None:
        self._is_closing = True
        self._writer.post(None)

    def join(self) -> None:
        """Wait until everything has been sent and nothing more arrives."""
        self._writer.join()
        self._reader.join()

    def _sent(self, data: bytes) -> int:
        """Return how many bytes the system takes at once."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # The reader sees the end, too.
            return len(data)

    def _read(self) -> When:
        """Wait for the next bytes, and pass on the messages that they complete. This worker does nothing else."""
        try:
            part = self._socket.recv(READ_BYTES)
            for frame in self._frames.push(part):
                self._received(self._decode(frame))
        except (OSError, msgspec.MsgspecError) as error:
            if not isinstance(error, OSError):
                log.exception("The other process has sent something that is no message")
            part = b""
        if part:
            return AT_ONCE
        self._end()
        self.close()
        self._writer.join()  # The writer no longer waits.
        self._socket.close()
        self._closed()
        return ENDED

    def _write(self) -> When:
        """Send what the system has not taken at once. It may block, since the other end never stops reading."""
        self._writer.clear()
        with self._lock:
            data = b"".join(self._unsent)
            self._unsent.clear()
            is_closing = self._is_closing
            self._is_writing = bool(data)
        with suppress(OSError):  # The reader sees the end, too.
            self._socket.sendall(data)
        with self._lock:
            self._is_writing = False
        if data:
            return AT_ONCE
        if is_closing:
            self._end()
            return ENDED
        return None

    def _end(self) -> None:
        """End the connection. The other end reads what was sent before."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
