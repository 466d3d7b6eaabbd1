"""HTTP/1.1 to one replica: persistent connections, requests, and answers piece by piece as they come.

A piece of a stream takes a few microseconds here: it passes a parser in C, and its content is not parsed. Usually it is
passed on before the event loop turns to anything else, without waking the task of its request. This file
knows neither the router nor the content of requests.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import cast

import httptools

from oaiserve.plugins.gateway.address import Address
from oaiserve.wire.report import MOST_REPORT_BYTES, Report

CONNECT_SECONDS = 2.0
# A peer whose machine doesn't respond counts as gone after eleven seconds, or after ten with unacknowledged data.
KEEPALIVE = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
MOST_IDLE = 64  # connections that are kept for further requests
MOST_HEAD_BYTES = 64 * 1024  # limit for an answer's head with all interim (1xx) heads before it, and for its trailers
MOST_HEADERS = 128
HEAD_SECONDS = 10.0  # from the first byte of a head to its end
MOST_GATHERED_BYTES = 256 * 1024  # reading pauses while more bytes of an answer than this wait for the client
# Parts of streams above this size take turns, at this rate for each replica. Marks cost CPU time. A replica that
# sends them endlessly must not hold up the event loop for the other replicas.
LARGE_PART_BYTES = 64 * 1024
LARGE_PARTS_BYTES_PER_SECOND = 4 * 2**20

Headers = Iterable[tuple[bytes, bytes]]


class NoAnswer(Exception):
    """A replica sends no usable answer. The message says why."""


class Unreachable(NoAnswer):
    """A replica has not begun to answer: it cannot be reached, or has ended. The message says which."""


class BadAnswer(NoAnswer):
    """A replica's answer is not valid HTTP, or has no end. The message says which."""


class TooLong(BadAnswer):
    """The body of a report or a list exceeds its limit."""


class CutOff(NoAnswer):
    """A replica has not completed an answer."""


class UpstreamAnswer:
    """The answer to one request. Its reader reads it to its end, or closes it."""

    def __init__(self, connection: ReplicaConnection) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.head: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done with the last header
        self._connection = connection
        self.parts: list[bytes] = []  # The connection adds parts of the body.
        self._num_bytes = 0  # Counts the bytes of the connection that came with these parts.
        self._is_paused = self._is_complete = self._is_lost = False
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None

    def header(self, name: bytes) -> bytes:
        """Return the value of a header by its name in lower case, or an empty one."""
        return next((value for own, value in self.headers if own == name), b"")

    @property
    def is_stream(self) -> bool:
        return self.header(b"content-type").startswith(b"text/event-stream")

    async def read(self, take: Callable[[bytes], bool] | None = None) -> bytes:
        """Wait for more of the body, and return all of it so far; nothing at its end. Raises CutOff.

        Parts of usual size that come during the wait are passed to `take` at once, which wakes no task. The wait ends
        when it returns False, which leaves the part to the caller, or with its exception.
        """
        while not self.parts:
            if self._is_complete:
                return b""
            if self._is_lost:
                raise CutOff("the replica has closed the connection")
            self._waiter = asyncio.get_running_loop().create_future()
            self._take = take
            try:
                await self._waiter
            finally:
                self._waiter = self._take = None
        part = b"".join(self.parts)
        self.parts.clear()
        self._num_bytes = 0
        self._resume()
        if len(part) > LARGE_PART_BYTES and self.is_stream:
            async with self._connection.turns:
                await asyncio.sleep(len(part) / LARGE_PARTS_BYTES_PER_SECOND)
        return part

    def close(self) -> None:
        """Stop reading. A replica with an unfinished answer notices the disconnect."""
        if not self._is_complete:
            self._connection.transport.abort()

    # -- called by the connection -------------------------------------------------------------------------------------

    def received(self, num_bytes: int) -> None:
        """Pass on the parts that came with `num_bytes` of the connection."""
        take = self._take
        if take is not None and num_bytes <= LARGE_PART_BYTES:
            parts = self.parts
            part = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            try:
                if take(part):
                    return
            except Exception as error:  # The reader raises it.
                self._wake(error)
                return
            parts.append(part)
        self._num_bytes += num_bytes
        if self._num_bytes > MOST_GATHERED_BYTES and not self._is_paused:
            self._is_paused = True
            self._connection.transport.pause_reading()
        self._wake()

    def completed(self) -> None:
        self._is_complete = True
        self._resume()  # The connection may be used again.
        self._wake()

    def lost(self, error: Unreachable | BadAnswer) -> None:
        self._is_lost = True
        if not self.head.done():
            self.head.set_exception(error)
        self._wake()

    def _resume(self) -> None:
        if self._is_paused and not self._connection.transport.is_closing():
            self._connection.transport.resume_reading()
        self._is_paused = False

    def _wake(self, error: Exception | None = None) -> None:
        self._take = None
        if self._waiter is not None and not self._waiter.done():
            if error is None:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(error)


class Upstream:
    """The connections to one replica."""

    def __init__(self, address: Address, number: int) -> None:
        self.address = address
        self.name = address.name
        self.number = number  # shown in place of the address
        self.shown = f"{number} ({self.name})"  # to operators
        self.num_failures = self.num_pauses = 0  # since its last answer
        self.num_ejections = self.out_until_ns = 0
        self.mute_until_ns = 0  # Until then, no reports are requested: it serves, but its reports can't be read.
        self.has_warned_of_reports = False  # whether the log has said that it sends no reports
        self.has_warned_of_marks = False  # whether the log has said that its streams cannot continue
        self.report: Report | None = None  # the latest one
        self.kind = b""  # from its latest stream; only replicas of the same kind write the same bytes
        self.num_open = 0  # Requests without a complete answer. Each sender updates it.
        self._tls = None if address.tls_name is None else ssl.create_default_context()
        self.idle: list[ReplicaConnection] = []
        self.connections: set[ReplicaConnection] = set()
        self._is_closed = False
        self._num_abandons = 0
        self.turns = asyncio.Lock()  # held by the stream whose large part is being processed

    async def ask(
        self,
        method: str,
        target: bytes,
        headers: Headers = (),
        body: bytes | bytearray = b"",
        on_sent: Callable[[], object] = lambda: None,
    ) -> UpstreamAnswer:
        """Send a request, call `on_sent`, and wait for the head of its answer. Raises Unreachable and BadAnswer."""
        lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), target, self.address.host.encode())]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        head = b"".join(lines)
        num_abandons = self._num_abandons
        while True:
            idle = self.idle.pop() if self.idle else None
            connection = idle or await self._connect()
            answer = connection.send(head, body)
            on_sent()
            try:
                await answer.head
                return answer
            except Unreachable:
                if idle is None or self._num_abandons != num_abandons:
                    raise
                # The replica may have closed an idle connection. A new one shows whether the replica is alive.
            except asyncio.CancelledError:
                answer.close()
                raise

    async def get(
        self,
        target: bytes,
        headers: Headers = (),
        most_bytes: int = MOST_REPORT_BYTES,
        seconds: float | None = None,
    ) -> tuple[int, bytes]:
        """Get a path within a time limit, and return status and body. Raises NoAnswer: TooLong for a body of more than
        `most_bytes`."""
        answer: UpstreamAnswer | None = None
        content = bytearray()
        try:
            async with asyncio.timeout(seconds):
                answer = await self.ask("GET", target, headers)
                while part := await answer.read():
                    content += part
                    if len(content) > most_bytes:
                        raise TooLong(f"a body of more than {most_bytes} bytes")
            return answer.status, bytes(content)
        except TimeoutError:
            raise Unreachable(f"no answer within {seconds} seconds") from None
        finally:
            if answer is not None:
                answer.close()

    def abandon(self) -> None:
        """Cut off all connections, because the replica is silent: its requests can move, and its streams go on."""
        self._num_abandons += 1
        for connection in [*self.connections]:
            connection.transport.abort()

    def close(self) -> None:
        """Close all idle connections, and keep no others from now on."""
        self._is_closed = True
        for connection in self.idle:
            connection.transport.close()
        self.idle.clear()

    async def _connect(self) -> ReplicaConnection:
        address = self.address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: ReplicaConnection(self),
                    address.ip,
                    address.port,
                    ssl=self._tls,
                    server_hostname=address.tls_name,
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {CONNECT_SECONDS:g} seconds") from None
        except OSError as error:
            raise Unreachable(error.strerror or str(error)) from None
        except ValueError as error:  # No resolver accepts the name.
            raise Unreachable(str(error)) from None
        return connection

    def keep(self, connection: ReplicaConnection) -> None:
        if self._is_closed or len(self.idle) >= MOST_IDLE:
            connection.transport.close()
        else:
            self.idle.append(connection)

    def forget(self, connection: ReplicaConnection) -> None:
        self.connections.discard(connection)
        with suppress(ValueError):
            self.idle.remove(connection)


class ReplicaConnection(asyncio.Protocol):
    """One connection, which has one request at a time."""

    transport: asyncio.Transport

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.turns = upstream.turns
        self._answer: UpstreamAnswer | None = None
        self._parser = httptools.HttpResponseParser(self)
        # Bytes since the head began, or since the last part of the body, because trailers and chunk extensions may be
        # endless.
        self._head_bytes = 0
        self._num_headers = 0
        self._is_in_head = False
        self._head_timer: asyncio.TimerHandle | None = None

    def send(self, head: bytes, body: bytes | bytearray) -> UpstreamAnswer:
        self._answer = answer = UpstreamAnswer(self)
        self._head_bytes = 0
        self._num_headers = 0
        if self.transport.is_closing():
            answer.lost(Unreachable("the replica has closed the connection"))
        else:
            if len(body) > LARGE_PART_BYTES:
                self.transport.write(head)
                self.transport.write(body)
            else:
                self.transport.write(head + body)  # Each write is a call of the system.
        return answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        for name, value in KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # Some systems lack some options.
                sock.setsockopt(socket.SOL_SOCKET if name.startswith("SO") else socket.IPPROTO_TCP, option, value)
        self._upstream.connections.add(self)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # These bytes answer no request.
            self.transport.abort()
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._spoil(answer, "another protocol")
        except httptools.HttpParserError as error:
            self._spoil(answer, str(error))
        if self._is_in_head and self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._head_is_late, answer)
        if self._head_bytes > MOST_HEAD_BYTES and self._answer is answer:
            self._spoil(answer, f"a head or trailers of more than {MOST_HEAD_BYTES} bytes")
        if answer.parts:
            answer.received(len(data))

    def _head_is_late(self, answer: UpstreamAnswer) -> None:
        self._spoil(answer, f"no end of the head within {HEAD_SECONDS:g} seconds")

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _spoil(self, answer: UpstreamAnswer, why: str) -> None:
        answer.lost(BadAnswer(why))
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._upstream.forget(self)
        if self._answer is not None:
            answer = self._answer
            self._answer = None
            answer.lost(Unreachable("the replica has ended the connection" if exc is None else str(exc)))

    # -- callbacks of the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_in_head = True
        if self._answer is None:  # These bytes follow an answer, and would begin the next one.
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is None or self._answer.head.done():  # This is a trailer.
            return
        self._num_headers += 1
        if self._num_headers > MOST_HEADERS:
            self._spoil(self._answer, f"more than {MOST_HEADERS} headers")
        else:
            self._answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        if self._answer is None:
            return
        self._answer.status = status = self._parser.get_status_code()
        if 100 <= status < 200:  # This is an interim answer.
            self._answer.headers.clear()
        elif not 100 <= status <= 599:
            self._spoil(self._answer, f"a status of {status}")
        elif not self._answer.head.done():
            self._answer.head.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._answer is not None:
            self._answer.parts.append(body)

    def on_message_complete(self) -> None:
        if self._answer is None or not self._answer.head.done():  # after an interim answer
            return
        answer = self._answer
        self._answer = None
        answer.completed()
        if self._parser.should_keep_alive():
            self._upstream.keep(self)
        else:
            self.transport.close()
