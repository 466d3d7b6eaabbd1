"""`GroupCommit` keeps all that waits for a database at once: a slow disk makes answers later, but not fewer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


class GroupCommit(Generic[Item]):
    """The items that wait for the thread of a database, and their callers, who wait until they are kept."""

    def __init__(self, thread: Executor, keep: Callable[[list[Item]], None]) -> None:
        """`keep` runs on `thread`, with all that waits. Its error is that of each who waits."""
        self._thread = thread
        self._keep = keep
        self._waiting: deque[tuple[Item, Future[None]]] = deque()

    async def put(self, item: Item) -> None:
        """Wait until it is kept. Who is cancelled before its turn has nothing kept."""
        done: Future[None] = Future()
        self._waiting.append((item, done))
        self._thread.submit(self._keep_all)
        await asyncio.wrap_future(done)

    def _keep_all(self) -> None:
        batch = []
        while self._waiting:
            item, done = self._waiting.popleft()
            if done.set_running_or_notify_cancel():
                batch.append((item, done))
        try:
            if batch:
                self._keep([item for item, _ in batch])
        except Exception as error:  # each of them gets it
            for _, done in batch:
                done.set_exception(error)
        else:
            for _, done in batch:
                done.set_result(None)
