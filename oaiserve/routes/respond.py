"""One request's life on the event loop: read the body, submit, wait for the first events, then SSE or one JSON.

Knows no shape of the API: a `Shape` renders. The status line of a stream is held back until its first token, so
that whatever goes wrong before is a proper HTTP error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oaiserve.engine.request import Aborted, Event, Failed, Finished, PromptDone, Request, TokenChunk, Usage
from oaiserve.engine.streams import LoopStream, append
from oaiserve.errors import (
    APIError,
    BodyTooLarge,
    InvalidRequest,
    RequestTimeout,
    SlowReader,
    Unavailable,
    WriteTimeout,
)
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.middleware import as_api_error, json_response
from oaiserve.routes.serving import Serving
from oaiserve.routes.shapes import Timings

LARGE_BODY_BYTES = 64 * 1024
PIECE_BYTES = 64 * 1024  # most that is handed to the connection at once, and so most that waits in it
WRITE_TIMED_OUT = "oaiserve.write_timed_out"  # ASGI extension: there once the server has cut the connection for that
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """How one route's answer looks. The methods with bytes give whole SSE events, or nothing."""

    def prompt(self, event: PromptDone) -> bytes: ...

    def delta(self, chunk: TokenChunk) -> bytes: ...

    def closing(self, usage: Usage, timings: Timings) -> bytes: ...

    def whole(self, prompts: list[PromptDone], choices: list[TokenChunk], usage: Usage) -> dict[str, Any]: ...


async def read_body(request: HTTPRequest, serving: Serving) -> bytes:
    """Raises BodyTooLarge, RequestTimeout, InvalidRequest (content type), and ClientDisconnect."""
    limit_bytes = serving.body_limit_bytes
    too_large = BodyTooLarge(f"The body is too large: this server reads at most {int(limit_bytes)} bytes.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > limit_bytes):
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(serving.body_timeout_seconds):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > limit_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        limit = f"{serving.body_timeout_seconds:g} seconds"
        raise RequestTimeout(f"The body did not arrive within {limit}. Please try again.") from None
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest(
            f"The content type must be application/json, got {content_type[:80]!r}. "
            "With curl: -H 'content-type: application/json'."
        )
    return b"".join(parts)


async def off_loop_if_large(content: bytes, build: Callable[[], T]) -> T:
    """What `build` makes of the body; in a thread where it could hold up the event loop for over a millisecond."""
    return build() if len(content) <= LARGE_BODY_BYTES else await run_in_threadpool(build)


async def write(send: Send, body: bytes, *, is_last: bool = False) -> None:
    """Waits while the client does not read. In pieces, so that a slow reader of a large body is seen to go on."""
    for start in range(0, len(body), PIECE_BYTES):
        end = start + PIECE_BYTES
        more_body = not is_last or end < len(body)
        await send({"type": "http.response.body", "body": body[start:end], "more_body": more_body})


class Answer:
    """The ASGI response to a checked request: submits it when called, and sees it through to its terminal event."""

    def __init__(self, serving: Serving, exchange: Exchange, request: Request, shape: Shape, *, stream: bool) -> None:
        self._serving = serving
        self._exchange = exchange
        self._request = request
        self._shape = shape
        self._is_streaming = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._serving.streams.submit(self._request)
        self._exchange.stream = stream
        watch = asyncio.create_task(self._abort_when_client_leaves(scope, receive, stream))
        try:
            if self._is_streaming:
                await self._send_events(scope, send, stream)
            else:
                await self._send_json(send, stream)
        except asyncio.CancelledError as error:
            if self._exchange.http_status is None:
                raise
            # The shutdown, with a part of the last piece still unread. The server is about to close the connection.
            self._exchange.error = as_api_error(error, scope)
            await watch
        finally:
            watch.cancel()
            stream.abort()

    async def _abort_when_client_leaves(self, scope: Scope, receive: Receive, stream: LoopStream) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # The engine answers with Aborted, which wakes up whoever waits for events.
        self._exchange.client_left = True
        if WRITE_TIMED_OUT in scope.get("extensions", {}):
            self._exchange.error = WriteTimeout("The client has stopped reading.")
        stream.abort()

    async def _send_json(self, send: Send, stream: LoopStream) -> None:
        prompts: list[PromptDone] = []
        choices: dict[int, TokenChunk] = {}
        while True:
            for event in await stream.next():
                if isinstance(event, TokenChunk):
                    self._note(event)
                    so_far = choices.setdefault(event.index, event)
                    if so_far is not event:
                        append(so_far, event)
                elif isinstance(event, PromptDone):
                    prompts.append(event)
                elif self._exchange.client_left:
                    return None
                elif isinstance(event, Finished):
                    if self._request.params.logprobs is None and self._request.params.prompt_logprobs is None:
                        response = self._whole(prompts, choices, event.usage)
                    else:  # thousands of tokens with 20 alternatives each would hold up every other stream
                        response = await run_in_threadpool(self._whole, prompts, choices, event.usage)
                    await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
                    return await write(send, bytes(response.body), is_last=True)
                elif (error := self._error(event)) is not None:
                    raise error

    def _whole(self, prompts: list[PromptDone], choices: dict[int, TokenChunk], usage: Usage) -> Response:
        prompts.sort(key=lambda prompt: prompt.prompt_index)
        content = self._shape.whole(prompts, [choices[index] for index in sorted(choices)], usage)
        return json_response(content, headers={"server-timing": self._exchange.server_timing()})

    async def _send_events(self, scope: Scope, send: Send, stream: LoopStream) -> None:
        events = await self._first_events(stream)
        if self._exchange.client_left:
            return
        error = self._error(events[-1])
        if error is not None and not any(isinstance(event, TokenChunk) for event in events):
            raise error
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hand out all tokens at once
            "server-timing": self._exchange.server_timing(),
        }
        encoded_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded_headers})
        send = scope["state"]["send"]  # measured: 2 of 18 us per token
        try:
            while not is_over(events):
                if body := await self._write_but_the_rest(send, events):
                    await write(send, body)
                events = await stream.next()
            last = await self._write_but_the_rest(send, events)
        except (Exception, asyncio.CancelledError) as unexpected:
            self._exchange.error = as_api_error(unexpected, scope)
            last = sse(self._exchange.error_body(self._exchange.error))
        await write(send, last + DONE, is_last=True)

    async def _first_events(self, stream: LoopStream) -> list[Event]:
        events: list[Event] = []
        while not is_over(events) and not any(isinstance(event, TokenChunk) for event in events):
            events += await stream.next()
        return events

    async def _write_but_the_rest(self, send: Send, events: list[Event]) -> bytes:
        """Renders the events of a step for one write, and gives that back. Where a slow reader has left much, most of
        it is written here, with turns for the other streams."""
        parts, num_bytes = [], 0
        for event in events:
            parts.append(self._render(event))
            num_bytes += len(parts[-1])
            if num_bytes >= PIECE_BYTES:
                await write(send, b"".join(parts))
                await asyncio.sleep(0)
                parts, num_bytes = [], 0
        return b"".join(parts)

    def _render(self, event: Event) -> bytes:
        if isinstance(event, TokenChunk):
            self._note(event)
            return self._shape.delta(event)
        if isinstance(event, PromptDone):
            return self._shape.prompt(event)
        if isinstance(event, Finished):
            return self._shape.closing(event.usage, self._exchange.timings)
        error = self._error(event)
        if error is None:
            return b""
        self._exchange.error = error
        return sse(self._exchange.error_body(error))

    def _note(self, chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            self._exchange.finish_reasons[chunk.index] = chunk.finish_reason

    def _error(self, event: Event) -> APIError | None:
        """Why the request ended, if that is something to tell the client."""
        if isinstance(event, Failed):
            return event.error
        if self._exchange.client_left or not isinstance(event, Aborted):
            return None
        if self._exchange.stream is not None and self._exchange.stream.too_slow:
            return SlowReader("The client has fallen too far behind its stream. Please read faster.")
        return Unavailable("The server is shutting down. Please try again.")


def is_over(events: list[Event]) -> bool:
    return bool(events) and isinstance(events[-1], Finished | Failed | Aborted)


def sse(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
