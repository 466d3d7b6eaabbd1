"""A network layer for httpx whose streams stamp each read when the event loop delivers it.

httpcore still speaks HTTP; only its network backend is replaced. This one costs about half as much per read as
httpcore's own, and takes the stamp before anything is parsed.
"""

# ruff: noqa: ASYNC109 - the signatures are httpcore's

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, cast

import httpcore
import httpx

_MOST_UNREAD = 64  # reads kept for a slow reader; beyond, the kernel's buffers fill up and the server has to wait


class StampedStream(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """One connection. `read_ns` is the arrival time of the bytes that `read` returned last."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._unread: deque[tuple[int, bytes]] = deque()
        self._is_closed = False
        self._error: Exception | None = None
        self._is_paused = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.read_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass of asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self._unread.append((self._clock_ns(), data))
        if len(self._unread) >= _MOST_UNREAD and self._transport is not None and not self._is_paused:
            self._transport.pause_reading()
            self._is_paused = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the bytes of the next read. `max_bytes` and `timeout` are ignored; the caller limits the time of the
        whole request."""
        while not self._unread:
            if self._error is not None:
                raise httpcore.ReadError(str(self._error)) from self._error
            if self._is_closed:
                return b""
            if self._is_paused and self._transport is not None:
                self._transport.resume_reading()
                self._is_paused = False
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.read_ns, data = self._unread.popleft()
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._is_closed or self._transport is None:
            raise httpcore.WriteError("the connection is closed")
        self._transport.write(buffer)

    async def aclose(self) -> None:
        if self._transport is not None:
            self._transport.abort() if self._unread else self._transport.close()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        assert self._transport is not None
        try:
            self._transport = await asyncio.get_running_loop().start_tls(
                self._transport, self, ssl_context, server_hostname=server_hostname, ssl_handshake_timeout=timeout
            )
        except (OSError, ssl.SSLError) as error:
            raise httpcore.ConnectError(str(error)) from error
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # httpcore checks this on an idle connection to see if the server has closed it
            return self._is_closed or bool(self._unread)
        return None


class StampedBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self.num_connections = 0

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                _, stream = await asyncio.get_running_loop().create_connection(
                    lambda: StampedStream(self._clock_ns), host, port
                )
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"no connection within {timeout} s") from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        self.num_connections += 1
        return stream


class StampedTransport(httpx.AsyncBaseTransport):
    """The transport of one httpx.AsyncClient. A response has its stream in `extensions["network_stream"]`."""

    def __init__(self, backend: httpcore.AsyncNetworkBackend, ssl_context: ssl.SSLContext | None) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=None,
            max_keepalive_connections=None,
            network_backend=backend,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        response = await self._pool.handle_async_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        return httpx.Response(
            response.status, headers=response.headers, stream=_Body(response), extensions=response.extensions
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._response.aiter_stream()

    async def aclose(self) -> None:
        await self._response.aclose()
