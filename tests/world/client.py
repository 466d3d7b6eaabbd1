"""The connections of clients to servers of a world: a test that waits for bytes lets the world go on meanwhile."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections import deque
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import httpcore
import httpcore2
import httpx
import httpx2

from tests.world.loop import Process, World


class _Reader(asyncio.Protocol):
    """Keeps what arrives until somebody reads it."""

    def __init__(self) -> None:
        self.received: deque[bytes] = deque()
        self.is_over = False
        self.error: Exception | None = None
        self.is_paused = False

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def eof_received(self) -> bool:
        self.is_over = True
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True
        self.error = error

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False


class WorldSocket:
    """A connection whose calls block the test, but not the world, as those of a socket."""

    def __init__(self, world: World, process: Process, host: str, port: int, timeout: float | None = None) -> None:
        """Connect a process. Raises OSError."""
        self._world = world
        self._timeout = timeout
        self._num_files = 0
        self._is_closed = False
        self._is_reading = True
        connecting = process.run(world.create_connection, _Reader, host, port)
        if not world.wait_for(connecting.done, timeout):
            connecting.cancel()
            raise TimeoutError
        self._transport, self._reader = connecting.result()

    def __enter__(self) -> WorldSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def has_arrived(self) -> bool:
        """Whether there is something to read, or the end."""
        return bool(self._reader.received or self._reader.is_over)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def stop_reading(self) -> None:
        """Leave unread what arrives from now on, until the next `recv`."""
        self._is_reading = False
        self._transport.pause_reading()

    def recv(self, most: int) -> bytes:
        reader = self._reader
        if not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()
        if not self._world.wait_for(lambda: self.has_arrived, self._timeout):
            raise TimeoutError
        if reader.received:
            data = reader.received.popleft()
            if len(data) > most:
                reader.received.appendleft(data[most:])
            return data[:most]
        if reader.error is not None:
            raise reader.error
        return b""

    def sendall(self, data: bytes) -> None:
        reader = self._reader
        if self._transport.is_closing():
            raise BrokenPipeError
        self._transport.write(data)
        if not self._world.wait_for(lambda: not reader.is_paused or reader.is_over, self._timeout):
            raise TimeoutError

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        self._num_files += 1
        return io.BufferedReader(_File(self))

    def close(self) -> None:
        """Close the connection once its files are closed, too."""
        self._is_closed = True
        self._close()

    def close_file(self) -> None:
        self._num_files -= 1
        self._close()

    def _close(self) -> None:
        if self._is_closed and not self._num_files:
            if self._is_reading:
                self._transport.close()
            else:  # A system resets a connection whose data nobody has read.
                self._transport.abort()
            # Garbage can be collected in the middle of a callback, in which nothing else may run.
            if not self._world.is_running():
                self._world.settle()


class _File(io.RawIOBase):
    """What a socket receives, as a file."""

    def __init__(self, connection: WorldSocket) -> None:
        super().__init__()
        self._connection = connection

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._connection.close_file()

    def readinto(self, buffer: Any) -> int:
        data = self._connection.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Stream:
    """A connection as httpcore wants it, in either of its packages."""

    def __init__(self, core: ModuleType, connection: WorldSocket) -> None:
        self._core = core
        self._connection = connection
        self.close = connection.close

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._connection.settimeout(timeout)
        try:
            return self._connection.recv(max_bytes)
        except TimeoutError:
            raise self._core.ReadTimeout from None
        except OSError as error:
            raise self._core.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._connection.settimeout(timeout)
        try:
            self._connection.sendall(buffer)
        except TimeoutError:
            raise self._core.WriteTimeout from None
        except OSError as error:
            raise self._core.WriteError(str(error)) from error

    def start_tls(self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float = 0) -> None:
        raise NotImplementedError("the world has no TLS")

    def get_extra_info(self, info: str) -> Any:
        return self._connection.has_arrived if info == "is_readable" else None


class _Backend:
    """Connects a process of the world for httpcore, in either of its packages."""

    def __init__(self, core: ModuleType, world: World, process: Process) -> None:
        self._core = core
        self._world = world
        self._process = process

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> _Stream:
        try:
            return _Stream(self._core, WorldSocket(self._world, self._process, host, port, timeout))
        except TimeoutError:
            raise self._core.ConnectTimeout from None
        except OSError as error:
            raise self._core.ConnectError(str(error)) from error

    def sleep(self, seconds: float) -> None:
        self._world.wait_for(lambda: False, seconds)


def transport(world: World, process: Process) -> httpx.HTTPTransport:
    """Return what sends the requests of a client as this process."""
    through = httpx.HTTPTransport(verify=False)  # To read the certificates takes 24 ms.
    through._pool = httpcore.ConnectionPool(
        network_backend=_Backend(httpcore, world, process),
        max_connections=None,
    )
    return through


def client_of_sdk(sdk: ModuleType, world: World, process: Process) -> Any:
    """Return the HTTP client of an SDK, as this process. SDKs before 2026 use httpx, and later ones httpx2."""
    if issubclass(sdk.DefaultHttpxClient, httpx.Client):
        return sdk.DefaultHttpxClient(transport=transport(world, process))
    through = httpx2.HTTPTransport(verify=False)
    through._pool = httpcore2.ConnectionPool(
        network_backend=_Backend(httpcore2, world, process),
        max_connections=None,
    )
    return sdk.DefaultHttpxClient(transport=through)
