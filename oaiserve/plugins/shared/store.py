"""`Store`: a part of the server's small database, with a separate thread, because a commit waits for the disk.

The plug-ins that keep what clients send share the file and its limits.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from oaiserve.errors import StoreFailed
from oaiserve.plugins.shared.store_options import StoreLimits
from oaiserve.runtime import Runtime

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
AnyStore = TypeVar("AnyStore", bound="Store")

RETRY_AFTER_SECONDS = 5


class Store:
    """A part of the database, with a separate connection, and the thread that does all work on it."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        thread_name: str,
        limits: StoreLimits,
        runtime: Runtime,
    ) -> None:
        self._connection = connection
        self._thread = runtime.executor(thread_name)
        self._limits = limits
        self._runtime = runtime

    async def close(self) -> None:
        await self.do(self._connection.close)
        self._thread.shutdown()

    async def do(self, work: Callable[[], T]) -> T:
        with reported():
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _clock(self) -> float:
        """Return the Unix time in seconds."""
        return self._runtime.unix_ns() / 1e9

    def _oldest(self) -> float:
        """Return the time before which items are too old."""
        return self._clock() - self._limits.seconds

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()


def on_thread(
    method: Callable[Concatenate[AnyStore, P], T],
) -> Callable[Concatenate[AnyStore, P], Coroutine[Any, Any, T]]:
    """Turn a method that works on the database into one that runs on the store's thread."""

    @wraps(method)
    async def run(store: AnyStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await store.do(partial(method, store, *args, **kwargs))

    return run


@contextmanager
def reported() -> Iterator[None]:
    """Turn an error of the database, such as a full disk or damaged content, into an error for the client, and log
    it."""
    try:
        yield
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        logger.error("The response store does not work: %s", error)
        raise StoreFailed(
            "The server's store of responses, conversations, files and batches failed; the server's log says why. Try "
            "again later. Requests that store nothing still work, such as a response with 'store': false.",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        ) from error
