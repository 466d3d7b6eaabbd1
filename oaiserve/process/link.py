"""`Link`: the two ways of messages between the front and an engine process, and the one over a Unix socket."""

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
from oaiserve.runtime import AT_ONCE, ENDED, Empty, Runtime, When, Worker

log = logging.getLogger(__name__)

READ_BYTES = 2**20  # in one go
MOST_SENT_TOGETHER = 64  # messages


class Link(Protocol):
    """One end. Any thread may send."""

    def start(self, received: Callable[[Any], None], closed: Callable[[], None]) -> None:
        """Begin to read. Each message is passed to `received`, and `closed` is called once, after the last one. Neither
        may wait for another message."""

    def send(self, message: object) -> None:
        """Send a message, without waiting. It is lost if the other end is gone."""

    def send_now(self, message: object) -> None:
        """Hand a small message to the system before this returns, so that it arrives even if this process ends."""

    def close(self) -> None:
        """Send what is waiting, and close this end."""


class SocketLink:
    """One end of a link over a connected stream socket, with a thread for each direction."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], Any], name: str, runtime: Runtime) -> None:
        """`decode` is of the messages that come."""
        self._socket = sock
        self._decode = decode
        self._frames = Frames()
        self._lock = Lock()  # held while a thread writes
        self._received: Callable[[Any], None] = lambda message: None
        self._closed: Callable[[], None] = lambda: None
        self._reader: Worker[None] = runtime.worker(f"{name}-reads", self._read)
        self._writer: Worker[object] = runtime.worker(f"{name}-writes", self._write)

    def start(self, received: Callable[[Any], None], closed: Callable[[], None]) -> None:
        self._received = received
        self._closed = closed
        self._reader.start()
        self._writer.start()

    def send(self, message: object) -> None:
        self._writer.post(message)

    def send_now(self, message: object) -> None:
        with self._lock, suppress(OSError):
            self._socket.sendall(framed(encode(message)))

    def close(self) -> None:
        self._writer.post(None)

    def join(self) -> None:
        """Wait until all has been sent, and nothing comes any more."""
        self._writer.join()
        self._reader.join()

    def _read(self) -> When:
        """Wait for the next bytes, and pass on the messages that they complete: this worker does nothing else."""
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
        self._closed()
        return ENDED

    def _write(self) -> When:
        messages: list[object] = []
        with suppress(Empty):
            while len(messages) < MOST_SENT_TOGETHER:
                messages.append(self._writer.take())
        is_last = None in messages
        try:
            # This may wait: the other end reads all the time.
            data = b"".join(framed(encode(message)) for message in messages if message is not None)
            with self._lock:
                self._socket.sendall(data)
        except OSError:  # The reader sees the end, too.
            return ENDED
        except Exception:
            log.exception("A message for the other process could not be written")
            is_last = True
        if is_last:
            self._end()
            return ENDED
        return AT_ONCE if self._writer.num_waiting() else None

    def _end(self) -> None:
        """End the connection. The other end reads what was sent before."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._writer.post(None)  # which ends it, too
