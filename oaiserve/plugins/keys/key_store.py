"""`KeyStore` connects a running server to the table of keys: which keys are valid, and what requests may and did use.

The table is a file, so the store has its own thread, and the event loop never waits. A request whose key has limits
waits for a transaction, which all waiting requests share. If the file doesn't work, requests of keys with limits are
refused. Others are served, and their use is counted later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from oaiserve.errors import RateLimited, StartupError, Unavailable
from oaiserve.plugins.keys.key_table import NO_LIMITS, KeyTable, StoredKey, Use
from oaiserve.runtime import Runtime

logger = logging.getLogger(__name__)

MOST_UNSETTLED = 100_000  # uses that wait for a broken file; older ones stay as reserved


class RequestUse(Use):
    """The use of a stored key by a request to this server."""

    def __init__(self, key: StoredKey, store: KeyStore) -> None:
        super().__init__(key)
        self._store = store

    async def reserve(self, tokens: int) -> None:
        await self._store.reserve(self, tokens)

    async def headers(self) -> Mapping[str, str]:
        if not self.left:
            with suppress(Unavailable):
                await self._store.look(self)
        return self.left

    def settle(self, tokens: int, cost: float) -> None:
        self._store.settle(self, tokens, cost)


class KeyStore:
    """The stored keys, and their uses by requests."""

    def __init__(self, table: KeyTable, runtime: Runtime) -> None:
        self._table = table
        self._version = table.version()
        self._valid = table.valid(self._begin)
        self._thread = runtime.executor("key-store")
        # Each use has the future that a request waits for, or None if the use is being settled.
        self._waiting: deque[tuple[Use, Callable[[], None], Future[None] | None]] = deque()

    def _begin(self, key: StoredKey) -> RequestUse:
        return RequestUse(key, self)

    def valid(self) -> Mapping[bytes, StoredKey]:
        """Return the keys that are valid now, and retry to count uses that could not be counted. This blocks."""
        return self._thread.submit(self._refreshed).result()

    async def reserve(self, use: Use, tokens: int) -> None:
        """Admit a request, and reserve `tokens` for it if its key has limits. Raises RateLimited, Unavailable."""
        if use.key.limits == NO_LIMITS:
            use.admitted = self._table.clock()
        else:
            await self._done(use, partial(self._table.reserve, use, tokens))

    async def look(self, use: Use) -> None:
        """Read how much the key has left, and store that in `use`. Raises Unavailable."""
        if use.key.limits != NO_LIMITS:
            await self._done(use, partial(self._table.look, use))

    def settle(self, use: Use, tokens: int, cost: float) -> None:
        """Count soon what a request has used, instead of its reservation. Call it once per request."""
        self._add(use, partial(self._table.settle, use, tokens, cost), None)

    async def listed(self) -> list[dict[str, Any]]:
        """Return all keys to show to people. Raises Unavailable."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._table.listed)
        except StartupError as error:
            logger.error("The table of keys cannot be read: %s", error)
            raise Unavailable(
                "The table of keys cannot be read; the server's log says why.", retry_after_seconds=5
            ) from error

    async def close(self) -> None:
        """Write all pending uses, including those that a failure has delayed, and close the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        self._do_all()
        self._table.close()

    async def _done(self, use: Use, work: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._add(use, work, done)
        await asyncio.wrap_future(done)

    def _add(self, use: Use, work: Callable[[], None], done: Future[None] | None) -> None:
        self._waiting.append((use, work, done))
        self._thread.submit(self._do_all)

    def _do_all(self) -> None:
        """Do all waiting work in one transaction, except for reservations whose request has gone."""
        batch = []
        while self._waiting:
            use, work, done = self._waiting.popleft()
            if done is None or done.set_running_or_notify_cancel():
                batch.append((use, work, done))
        errors: dict[Future[None] | None, Exception] = {}
        try:
            if batch:
                with self._table.transaction():
                    for _, work, done in batch:
                        try:
                            work()
                        except RateLimited as error:
                            errors[done] = error
        except Exception as error:  # After any error, the waiting requests need an answer.
            logger.error("The table of keys does not work: %s: %s", type(error).__name__, error)
            self._waiting.extendleft([one for one in reversed(batch) if one[2] is None][:MOST_UNSETTLED])
            text = "The limits of the API key cannot be checked at the moment; the server's log says why."
            for use, _, done in batch:
                if done is not None:
                    use.admitted = None
                    errors[done] = Unavailable(text, retry_after_seconds=5)
        for _, _, done in batch:
            if done is not None and done in errors:
                done.set_exception(errors[done])
            elif done is not None:
                done.set_result(None)

    def _refreshed(self) -> Mapping[bytes, StoredKey]:
        try:
            if (version := self._table.version()) != self._version:
                self._valid = self._table.valid(self._begin)
                self._version = version
                logger.info("The stored keys have changed: %d are valid.", len(self._valid))
        except Exception as error:  # After any error, the next attempt may succeed.
            logger.error("The table of keys cannot be read: %s. The keys that it had before stay valid.", error)
        self._do_all()
        return self._valid
