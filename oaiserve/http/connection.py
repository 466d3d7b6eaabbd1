"""`Connection` is uvicorn's HTTP/1.1 protocol with bounds: on heads, on silence, and on unread bytes.

Each request gets one answer, in the order of the requests. This file knows no route and no engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum, auto
from typing import Any

import httptools

from oaiserve.config import ServerOptions
from oaiserve.errors import APIError, HeadersTooLarge, InvalidRequest, MethodNotAllowed, RequestTimeout
from oaiserve.http.connections import CONNECTION, UPGRADE, WRITE_TIMED_OUT, Refusal, client_of
from oaiserve.http.uvicorn_parts import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

MOST_HEAD_BYTES = 64 * 1024  # limit of a request line with its headers, and of the trailers of a body
MOST_HEADERS = 128  # limit that includes trailers
MOST_PIPELINED = 64  # requests that wait for the answer to an earlier one
GOODBYE_SECONDS = 5.0  # A client's further bytes are discarded for this long before its connection is closed.

Headers = Iterable[tuple[bytes, bytes]]


class Reading(Enum):
    """The part of a request for which a connection is waiting."""

    NOTHING = auto()  # between requests
    HEAD = auto()
    BODY = auto()


class Wait(Enum):
    """The event for which a connection waits while no answer is under way, within a time limit."""

    HEAD = auto()  # the complete head of a request
    IDLE = auto()  # another request
    GOODBYE = auto()  # the client to close the connection, after the last answer


class AnswerTransport:
    """The transport as an answer sees it: `close` lets the client read the answer first."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write  # The transport's own method is fast; an answer may have thousands of chunks.
        self.is_closing = transport.is_closing
        self.close = close


class Connection(HttpToolsProtocol):
    """The protocol of one connection.

    `count` is called with the reason if the server ends the connection against the client's will, and `on_lost`
    whenever the connection has ended. `charge` is `Refusals.charge`.
    """

    def __init__(
        self,
        *args: Any,
        options: ServerOptions,
        clock_ns: Callable[[], int],
        count: Callable[[Refusal], None] = lambda refusal: None,
        charge: Callable[[bytes, int], int] = lambda client, cpu_ns: 0,
        on_lost: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._options = options
        self._clock_ns = clock_ns
        self._count = count
        self._charge = charge
        self._on_lost = on_lost
        self._extensions: dict[str, dict[object, object]] = {
            CONNECTION: {
                "cut": self._cut,
                "awaits_body": self._awaits_body,
                "charge": charge,
                "part_writer": self._part_writer,
            }
        }
        self._write_timer: asyncio.TimerHandle | None = None
        self._wait: Wait | None = None
        self._wait_timer: asyncio.TimerHandle | None = None
        self._reading = Reading.NOTHING
        self._has_begun = False  # The first request has begun.
        self._running: RequestResponseCycle | None = None  # the current or the last request
        self._wanted_protocol = ""  # the protocol that the current request asks for, in lower case
        self._raw: Callable[[bytes], None] | None = None  # receives the client's data in another protocol
        self._on_drain: Callable[[], None] = _nothing  # called at a shutdown, in another protocol
        self._is_deaf = False  # Further data is discarded, because the connection will be closed.
        self._last_words: bytes | None = None  # an error to send after all answers, before the connection ends
        self._parsing_ns = 0  # time spent parsing the invalid data
        self._last_words_timer: asyncio.TimerHandle | None = None
        # Size so far of the current request's head, or of its trailers.
        self._num_headers = 0
        self._head_bytes = 0
        # Bytes since the parser last completed an element. Without a limit, a single header could go on forever.
        self._has_progressed = False
        self._unused_bytes = 0

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing pauses as soon as the kernel accepts no more data, and resumes when it has accepted everything. So a
        # pause lasts until the client reads, and little more than one piece of a body is ever buffered.
        transport.set_write_buffer_limits(high=1, low=0)
        self._answer_transport = AnswerTransport(transport, self._close_after_answer)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        self._wait_for(None)
        if self._last_words_timer is not None:
            self._last_words_timer.cancel()
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn marks only `self.cycle`, which belongs to another request if requests are pipelined.
            running.disconnected = True
            running.message_event.set()
        self._raw = None  # Break a reference cycle: the other protocol's handler holds this connection.
        self._on_drain = _nothing
        super().connection_lost(exc)
        self._on_lost()

    def shutdown(self) -> None:
        self._on_drain()
        if self._last_words_timer is not None:
            self._last_words_timer.cancel()
            self._say_them()
        elif self._is_answering():
            super().shutdown()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._options.write_timeout_seconds:
            self._write_timer = self.loop.call_later(self._options.write_timeout_seconds, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _cut(self) -> None:
        """Cut the connection by `abort`. `close` would wait until the client has read the buffered data."""
        self._extensions[WRITE_TIMED_OUT] = {}
        self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # -- time ---------------------------------------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _watch(self) -> None:
        """Start the timer for the connection's current wait, unless it runs already."""
        if self._is_answering():
            self._wait_for(None)
        elif self._reading is Reading.HEAD or not self._has_begun:
            self._wait_for(Wait.HEAD)
        else:
            self._wait_for(Wait.IDLE)

    def _wait_for(self, wait: Wait | None) -> None:
        if wait is self._wait:
            return
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None
        self._wait = wait
        if wait is not None:
            seconds = GOODBYE_SECONDS
            if wait is Wait.HEAD:
                seconds = self._options.header_timeout_seconds
            elif wait is Wait.IDLE:
                seconds = self._options.idle_timeout_seconds
            self._wait_timer = self.loop.call_later(seconds, self._time_is_up)

    def _time_is_up(self) -> None:
        self._wait_timer = None
        if self._wait is Wait.HEAD and self._reading is Reading.HEAD:
            limit = f"{self._options.header_timeout_seconds:g} seconds"
            error = RequestTimeout(f"The headers did not arrive within {limit}. Please try again.")
            self._refuse(error, Refusal.HEADER_TIMEOUT)
            return
        if self._wait is Wait.HEAD:
            self._count(Refusal.HEADER_TIMEOUT)
        self.transport.close()

    # -- data from the client -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._raw is not None:
            self._raw(data)
            return
        self._has_progressed = False
        began_ns = self._clock_ns()
        try:
            self._parse(data)
            self._unused_bytes = 0 if self._has_progressed else self._unused_bytes + len(data)
            if self._unused_bytes > MOST_HEAD_BYTES:
                raise _headers_too_large()
        except APIError as error:
            self._parsing_ns = self._clock_ns() - began_ns
            self._refuse(error, Refusal.INVALID)
        except httptools.HttpParserError as error:
            self._parsing_ns = self._clock_ns() - began_ns
            # An error that we raised in a parser callback is the context of the parser's own error.
            own = error.__context__
            if not isinstance(own, APIError):
                own = InvalidRequest(f"This is not a valid HTTP request: {error}.")
            self._refuse(own, Refusal.INVALID)
        else:
            self._watch()

    def _parse(self, data: bytes | memoryview) -> None:
        """Pass the data to the parser.

        The parser stops at a request that asks for another protocol. A new parser then reads that request as plain
        HTTP, so that it passes all checks. Its route may switch the protocol. Most routes don't, which HTTP permits.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise MethodNotAllowed("CONNECT is not allowed: this server is no proxy.") from None
                wanted = next((value for name, value in self.headers if name == b"upgrade"), b"")
                self._wanted_protocol = wanted.decode("latin-1").strip().lower()
                head = [b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())]
                head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # uvicorn does the same.
                self.parser.feed_data(b"".join([*head, b"\r\n"]))
                data = memoryview(data)[upgrade.args[0] :]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._reading = Reading.HEAD
        self._num_headers = self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._has_progressed = True
        self._head_bytes += len(url)
        if self._head_bytes > MOST_HEAD_BYTES:
            raise _headers_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_progressed = True
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MOST_HEAD_BYTES or self._num_headers > MOST_HEADERS:
            raise _headers_too_large()
        if self._reading is Reading.HEAD:  # Trailers are dropped: they come after the checks of headers.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_progressed = True
        if self.parser.should_upgrade():
            return  # `_parse` will read the head again.
        if len(self.pipeline) >= MOST_PIPELINED:
            self.pipeline.clear()  # Otherwise, the refusal would come only after up to 64 answers.
            raise InvalidRequest(f"At most {MOST_PIPELINED} requests may wait for an answer on one connection.")
        encodings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if encodings not in ([], [b"chunked"]):
            # A proxy might compute another body length, and take for a request what this server takes for the body.
            raise InvalidRequest("The transfer encoding must be 'chunked', once, or there must be none.")
        if self._wanted_protocol and self.parser.get_http_version() != "1.0":  # HTTP/1.0 has no status 101.
            self.scope["extensions"] = {**self._extensions, UPGRADE: self._upgrade(self._wanted_protocol)}
        self._wanted_protocol = ""
        super().on_headers_complete()
        self.cycle.transport = self._answer_transport  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign, assignment]
        self._reading = Reading.BODY
        self._has_begun = True

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._reading is Reading.BODY:
            super().on_message_complete()
            self._reading = Reading.NOTHING

    def _upgrade(self, protocol: str) -> dict[object, object]:
        def take(to: Callable[[bytes], None], on_drain: Callable[[], None]) -> None:
            assert self._running is not None
            self._running.chunked_encoding = False
            self._raw = to
            self._on_drain = on_drain

        def write(data: bytes) -> None:
            if not self.transport.is_closing():
                self.transport.write(data)

        return {
            "protocol": protocol,
            "take": take,
            "write": write,
            "drain": self.flow.drain,
            "pause": self.flow.pause_reading,
            "resume": self.flow.resume_reading,
        }

    # -- answers ------------------------------------------------------------------------------------------------------

    def _awaits_body(self) -> bool:
        return self._reading is Reading.BODY and self.cycle is self._running

    def _part_writer(self) -> Callable[[bytes], bool] | None:
        cycle = self._running
        if cycle is None or not cycle.chunked_encoding or cycle.scope["method"] == "HEAD":
            return None
        write = self.transport.write

        def write_part(part: bytes) -> bool:
            if self.flow.write_paused or cycle.disconnected or cycle.response_complete:
                return False
            if part:
                write(b"%x\r\n%b\r\n" % (len(part), part))
            return True

        return write_part

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Continue with the next request. This replaces uvicorn's method, which has only one timer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._wait is Wait.GOODBYE:
            return
        if self._raw is not None:
            self._say_goodbye()
        elif self.pipeline:
            self.flow.resume_reading()
            self._start_asgi_task(*self.pipeline.pop())
        elif self._last_words is not None:
            self._say_last_words()
        elif self._reading is Reading.BODY:
            self._say_goodbye()  # The rest of the body is not read.
        else:
            self.flow.resume_reading()
            self._watch()

    def _close_after_answer(self) -> None:
        if self._reading is Reading.NOTHING:
            self.transport.close()
        else:
            self._say_goodbye()

    def _refuse(self, error: APIError, refusal: Refusal) -> None:
        """Answer the unfinished request with the error, after all earlier answers, and end the connection."""
        self._count(refusal)
        self._is_deaf = True
        self._last_words = closing_answer(error, self.server_state.default_headers)
        if self._reading is Reading.BODY:
            self._give_up_body()
        if self._is_answering():
            self.flow.pause_reading()
        else:
            self._say_last_words()

    def _give_up_body(self) -> None:
        """Detach the request with the broken body from the app, so that it is answered only once."""
        cycle = self.cycle
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        elif cycle.response_started:
            self._last_words = b""
        else:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
            self._running = None

    def _say_last_words(self) -> None:
        """Send the error, after a delay for a client with many errors. Nothing is read meanwhile."""
        address, _ = self.client or ("", 0)
        delay_ns = self._charge(client_of(address), self._parsing_ns) if self._last_words else 0
        if delay_ns:
            self._wait_for(None)
            self.flow.pause_reading()
            self._last_words_timer = self.loop.call_later(delay_ns / 1e9, self._say_them)
        else:
            self._say_them()

    def _say_them(self) -> None:
        self._last_words_timer = None
        if self._last_words and not self.transport.is_closing():
            self.transport.write(self._last_words)
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        """End the connection, after discarding the client's further bytes for a while.

        If a connection is closed while data arrives, the client's system may drop the answer before it is read."""
        if self.transport.is_closing():
            return
        self._is_deaf = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._wait_for(Wait.GOODBYE)


def _nothing() -> None:
    """Do nothing at a shutdown: the connection speaks plain HTTP."""


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return a `send` for an HTTP/1.0 client, which does not support chunks. An answer without a length ends when the
    connection is closed."""
    send = cycle.send
    has_length = True

    async def send_without_chunks(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts this down.
        await send(message)

    return send_without_chunks


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"The headers are too large: this server reads at most {MOST_HEADERS}, of {MOST_HEAD_BYTES} bytes with the URL."
    )


def closing_answer(error: APIError, headers: Headers) -> bytes:
    """Return a complete HTTP response with the error, for a connection that is then closed. It needs no request."""
    body = json.dumps(error.body()).encode()
    own = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers(),
    }
    lines = [b"%b: %b\r\n" % header for header in headers]
    lines += [f"{name}: {value}\r\n".encode() for name, value in own.items()]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])
