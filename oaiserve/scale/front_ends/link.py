"""The two pairs of sockets between the engine process and a front end: `Link` carries messages over an end of the one.

It knows frames of bytes, and nothing of their meaning. No thread waits for the other side: the event loop writes the
rest when the system takes more. Over the other pair, accepted connections pass as descriptors to the front end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from threading import Condition

from oaiserve.scale.front_ends.messages import LENGTH

log = logging.getLogger(__name__)

ADDRESS_BYTES = 64  # more than any address has, with the name of its interface
READ_BYTES = 2**18  # at once
MOST_UNSENT_BYTES = 2**26  # for a side that does not read: then it is not waited for any longer


class Link:
    """One end of the pair. Any thread may `send`; everything else happens on the event loop."""

    def __init__(self, sock: socket.socket, most_unsent_bytes: int = MOST_UNSENT_BYTES) -> None:
        self._sock = sock
        self._most_unsent_bytes = most_unsent_bytes
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._changed = Condition()  # guards these two, and is notified when all is sent
        self._received = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_lost = False

    def start(self, take: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        """Pass the body of each frame to `take`, and call `on_lost` once when the other side is gone.

        An error of `take` counts as its end: its bytes make no sense.
        """
        self._take, self._on_lost = take, on_lost
        self._loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._read)
        with self._changed:
            if self._unsent:
                self._loop.add_writer(self._sock, self._write)

    def send(self, frame: bytes | bytearray) -> None:
        """Send a frame, or keep it until the other side takes more. It is dropped if the other side is gone."""
        with self._changed:
            if self.is_lost:
                return
            num_sent = 0 if self._unsent or self._loop is None else self._try_to_send(frame)
            if num_sent == len(frame):
                return
            is_first = not self._unsent
            self._unsent.append(memoryview(frame)[num_sent:])
            self._num_unsent += len(frame) - num_sent
            is_too_much = self._num_unsent > self._most_unsent_bytes
        if self._loop is None:
            return  # `start` writes it
        if is_too_much:
            log.error("%d bytes wait for a process that does not read them. It is given up", self._num_unsent)
            self._loop.call_soon_threadsafe(self.lose)
        elif is_first:
            self._loop.call_soon_threadsafe(self._begin_to_write)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all is sent, in another thread than the event loop's. Return False if it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_lost or not self._unsent, timeout_seconds)

    def lose(self) -> None:
        """Have nothing to do with the other side any more."""
        with self._changed:
            if self.is_lost:
                return
            self.is_lost = True
            self._unsent.clear()
            self._num_unsent = 0
            self._changed.notify_all()
        if self._loop is not None:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._on_lost()

    def _try_to_send(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # it is gone, which the next read shows
            return len(data)

    def _begin_to_write(self) -> None:
        if not self.is_lost and self._loop is not None:
            self._loop.add_writer(self._sock, self._write)

    def _write(self) -> None:
        with self._changed:
            while self._unsent:
                data = self._unsent[0]
                num_sent = self._try_to_send(data)
                self._num_unsent -= num_sent
                if num_sent < len(data):
                    self._unsent[0] = data[num_sent:]
                    return
                self._unsent.popleft()
            self._changed.notify_all()
        assert self._loop is not None
        self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.lose()
            return
        received = self._received
        received += data
        begin = 0
        try:
            while len(received) - begin >= LENGTH.size:
                (length,) = LENGTH.unpack_from(received, begin)
                end = begin + LENGTH.size + length
                if end > len(received):
                    break
                self._take(bytes(memoryview(received)[begin + LENGTH.size : end]))
                begin = end
        except Exception:
            log.exception("A message between processes makes no sense, so the other process is given up")
            self.lose()
            return
        del received[:begin]


def hand_over(channel: socket.socket, client: socket.socket, address: str) -> bool:
    """Pass a connection to the front end at the other end of the channel. Return False if that takes none now.

    The caller closes its own descriptor if it was taken.
    """
    try:
        socket.send_fds(channel, [address.encode().ljust(ADDRESS_BYTES, b"\0")], [client.fileno()])
    except OSError:  # the buffer is full, or the front end is gone
        return False
    client.close()
    return True


class HandedOver(socket.socket):
    """The other end of the channel, as a listening socket: its connections have been accepted already."""

    def __init__(self, channel: socket.socket, on_dropped: Callable[[str], None]) -> None:
        """`on_dropped` gets the address of a client for whose connection this process has no descriptor left."""
        super().__init__(fileno=channel.detach())
        self._on_dropped = on_dropped

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Return the next connection, and the address of its client. Raises BlockingIOError if there is none now."""
        data, descriptors, _, _ = socket.recv_fds(self, ADDRESS_BYTES, 1)
        if not data:
            raise BlockingIOError  # the engine process is gone, as the link says, too
        address = data.rstrip(b"\0").decode()
        if not descriptors:
            self._on_dropped(address)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return socket.socket(fileno=descriptors[0]), (address, 0)
