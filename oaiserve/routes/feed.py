"""One stream for any number of viewers: a message is made once, off the event loop, and only while somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.concurrency import run_in_threadpool

from oaiserve.errors import Overloaded

INTERVAL_SECONDS = 1.0
# They are written to in one go, which holds up everything else on the event loop for about 0.1 ms each.
MOST_VIEWERS = 64
RETRY_AFTER_SECONDS = 10


class Feed:
    """`render()` makes a message; it may block. All methods belong to the event loop."""

    def __init__(
        self,
        render: Callable[[], bytes],
        interval_seconds: float = INTERVAL_SECONDS,
        most_viewers: int = MOST_VIEWERS,
    ) -> None:
        self._render = render
        self._interval_seconds = interval_seconds
        self._most_viewers = most_viewers
        self._num_viewers = 0
        self._is_awaited = False  # since the last message
        self._producer: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """A place among the viewers. Raises Overloaded where all are taken."""
        if self._num_viewers >= self._most_viewers:
            raise Overloaded(
                f"{self._num_viewers} viewers follow the dashboard already, and this server takes no more. "
                "Please close a page that nobody looks at, or try again later.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

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
