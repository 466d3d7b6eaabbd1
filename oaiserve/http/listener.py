"""`Listener` accepts the connections that `Connections` admits.

It replaces the event loop's own accepting, so that a connection counts from its first moment on, even before a
handshake, and a refused one never becomes more than an accepted socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from oaiserve.http.connections import Connections

log = logging.getLogger(__name__)

MOST_AT_ONCE = 128  # connections that are accepted in one turn of the event loop
RETRY_SECONDS = 1.0  # pause after the system refuses to accept
MOST_BYTES_READ = 64 * 1024  # bytes that are read from a refused client


class Listener:
    """Accepts connections from a listening socket until `close`, and passes admitted ones to `begin`.

    `refusal` returns the bytes for a client that exceeds a limit. Without it, as with TLS, such a client gets no bytes,
    because it could not read them before a handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        begin: Callable[[socket.socket, str], None],
        *,
        refusal: Callable[[], bytes] | None,
        most_at_once: int = MOST_AT_ONCE,
    ) -> None:
        """Listen at once. `begin` gets an accepted socket and the client's address."""
        self._most_at_once = most_at_once
        self._sock = sock
        self._connections = connections
        self._begin = begin
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def _listen(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(self._most_at_once):
            try:
                client, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # No descriptor or no memory is left. Retrying at once would keep a core busy.
                log.error("Cannot accept connections (%s), trying again in %g s", error, RETRY_SECONDS)
                self._loop.remove_reader(self._sock)
                self._retry = self._loop.call_later(RETRY_SECONDS, self._listen)
                return
            client.setblocking(False)
            host = address[0] if address else ""  # Clients of a Unix socket have no address.
            if self._connections.admit(host) is None:
                self._begin(client, host)
            else:
                self._turn_away(client)

    def _turn_away(self, client: socket.socket) -> None:
        if self._refusal is None:
            client.close()
        else:
            send_last(client, self._refusal())


def send_last(client: socket.socket, answer: bytes) -> None:
    """Send an answer of a few bytes, and close the connection."""
    with client:
        try:
            client.send(answer)  # It always fits into the kernel's empty buffer.
            client.shutdown(socket.SHUT_WR)
            client.recv(MOST_BYTES_READ)  # Closing with unread data might discard the answer.
        except OSError:
            pass  # The client has gone, or has sent nothing yet.


async def speaks_http(client: socket.socket, limit_seconds: float) -> bool:
    """Return whether a client speaks without TLS: its first byte is a letter, not that of a handshake.

    Raises OSError if nothing arrives in time.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(client, readable.set)
    try:
        async with asyncio.timeout(limit_seconds):
            await readable.wait()
    finally:
        loop.remove_reader(client)
    return client.recv(1, socket.MSG_PEEK).isalpha()
