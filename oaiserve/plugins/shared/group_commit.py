"""`GroupCommit` stores all waiting items together: a slow disk delays answers, but does not make them fewer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


class GroupCommit(Generic[Item]):
    """Items that wait for the thread of a database, with their callers, who wait until the items are stored."""

    def __init__(self, thread: Executor, keep: Callable[[list[Item]], None]) -> None:
        """`keep` runs on `thread` with all waiting items. If it raises, each of their callers gets the error."""
        self._thread = thread
        self._keep = keep
        self._waiting: deque[tuple[Item, Future[None]]] = deque()

    async def put(self, item: Item) -> None:
        """Wait until the item is stored. If the caller is cancelled before its turn, nothing is stored."""
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
        except Exception as error:  # Each caller gets the error.
            for _, done in batch:
                done.set_exception(error)
        else:
            for _, done in batch:
                done.set_result(None)
