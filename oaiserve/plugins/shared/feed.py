"""Sends one stream of messages to many viewers. Each message is made once for all viewers, and only while there are
any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from oaiserve.errors import Overloaded
from oaiserve.routes.answer import sse

INTERVAL_SECONDS = 1.0
# A message is written to all viewers at once, which occupies the event loop for about 0.1 ms each.
MOST_VIEWERS = 64
RETRY_AFTER_SECONDS = 10
LAST_SAMPLES = 4  # samples of a message that brings samples, for viewers that missed one
_HEADERS = {**sse.HEADERS, "cache-control": "no-store"}


class Feed:
    """Hands each message of `render`, which may block, to all waiting viewers. All methods run on the event loop."""

    def __init__(self, render: Callable[[], bytes], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._render = render
        self._interval_seconds = interval_seconds
        self._num_viewers = 0
        self._next: asyncio.Task[bytes] | None = None  # set while viewers wait for it

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Hold a place among the viewers while the context lasts. Raises Overloaded if all places are taken."""
        if self._num_viewers >= MOST_VIEWERS:
            raise Overloaded(
                f"{self._num_viewers} viewers follow the dashboard already, and this server takes no more. "
                "Please close a page that is not needed, or try again later.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    async def next(self) -> bytes:
        """Return the next message, made after this call. Raises the errors of `render`."""
        if self._next is None:
            self._next = asyncio.create_task(self._made())
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            with suppress(asyncio.CancelledError):
                await self._next

    async def _made(self) -> bytes:
        await asyncio.sleep(self._interval_seconds)
        self._next = None  # Later callers get the one after this.
        return await self._message()

    async def _message(self) -> bytes:
        return await run_in_threadpool(self._render)


def feed_response(request: Request, feed: Feed, events: AsyncIterator[bytes]) -> Response:
    if request.method == "HEAD":  # The answer would never end.
        return Response(headers=_HEADERS)
    return _FeedResponse(feed, events)


class _FeedResponse(StreamingResponse):
    """A response that holds a place among the viewers until its end."""

    def __init__(self, feed: Feed, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers=_HEADERS)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.viewer():
            await super().__call__(scope, receive, send)
