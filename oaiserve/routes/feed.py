"""Sends one stream of messages to many viewers. A message is made once for all, and only while there are viewers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.concurrency import run_in_threadpool

from oaiserve.errors import Overloaded

INTERVAL_SECONDS = 1.0
# A message is written to all viewers at once, which occupies the event loop for about 0.1 ms each.
MOST_VIEWERS = 64
RETRY_AFTER_SECONDS = 10


class Feed:
    """Hands each message of `render`, which may block, to all waiting viewers. All methods are the event loop's."""

    def __init__(self, render: Callable[[], bytes], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._render = render
        self._interval_seconds = interval_seconds
        self._num_viewers = 0
        self._is_awaited = False  # whether a viewer has asked since the last message
        self._producer: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None

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
        if self._producer is None or self._producer.done():
            self._next = asyncio.get_running_loop().create_future()
            self._producer = asyncio.create_task(self._produce())
        assert self._next is not None
        self._is_awaited = True
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        if self._producer is not None:
            self._producer.cancel()
            with suppress(asyncio.CancelledError):
                await self._producer

    async def _produce(self) -> None:
        """Make messages until an interval without a viewer, or until `render` fails."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            if not self._is_awaited:
                return
            awaited, self._next = self._next, asyncio.get_running_loop().create_future()
            assert awaited is not None
            self._is_awaited = False
            try:
                awaited.set_result(await run_in_threadpool(self._render))
            except Exception as error:
                awaited.set_exception(error)
                return
