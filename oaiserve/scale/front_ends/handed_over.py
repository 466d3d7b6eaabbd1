"""Passes accepted connections from the engine process to a front end, as descriptors over a pair of sockets."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

ADDRESS_BYTES = 64  # more than any address has, with the name of its interface


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


class HandedOver:
    """The other end of the channel, used like a listening socket: its connections have been accepted already."""

    def __init__(self, channel: socket.socket, on_dropped: Callable[[str], None]) -> None:
        """`on_dropped` gets the address of a client for whose connection this process has no descriptor left."""
        self._channel = channel
        self._on_dropped = on_dropped

    def fileno(self) -> int:
        return self._channel.fileno()

    def setblocking(self, flag: bool, /) -> None:
        self._channel.setblocking(flag)

    def close(self) -> None:
        self._channel.close()

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Return the next connection, and the address of its client. Raises BlockingIOError if there is none now."""
        data, descriptors, _, _ = socket.recv_fds(self._channel, ADDRESS_BYTES, 1)
        if not data:
            raise BlockingIOError  # the engine process is gone, as the link says, too
        address = data.rstrip(b"\0").decode()
        if not descriptors:
            self._on_dropped(address)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return socket.socket(fileno=descriptors[0]), (address, 0)
