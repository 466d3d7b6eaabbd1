"""One stream for any number of viewers: a message is made once, off the event loop, and only while somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.concurrency import run_in_threadpool

INTERVAL_SECONDS = 1.0


class Feed:
    """`render()` makes a message; it may block. All methods belong to the event loop."""

    def __init__(self, render: Callable[[], bytes], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._render = render
        self._interval_seconds = interval_seconds
        self._is_awaited = False  # since the last message
        self._producer: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None

    async def next(self) -> bytes:
        """The next message that is made; what was made while nobody asked is not kept. Raises what `render` raised."""
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
        """Ends when nobody has asked for an interval, and when `render` fails."""
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
