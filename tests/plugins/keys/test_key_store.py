"""Tests that requests which ask at once, and are given up at any moment, leave nothing reserved."""

import asyncio
import sqlite3
import threading
from contextlib import AbstractContextManager, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.errors import RateLimited
from oaiserve.plugins.keys.key_store import KeyStore
from oaiserve.plugins.keys.key_table import KeyTable, Use


class Gated(KeyTable):
    """A table that does not reserve before it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_asked = threading.Event()
        self.may_go_on = threading.Event()

    def reserve(self, use: Use, tokens: int) -> None:
        self.is_asked.set()
        assert self.may_go_on.wait(60)
        super().reserve(use, tokens)


async def test_a_request_that_is_given_up_while_it_is_admitted_is_settled_after_that(tmp_path: Path) -> None:
    table = Gated(tmp_path / "store")
    table.add("alice", {"tokens_per_day": 300})
    (key,) = table.valid().values()
    store = KeyStore(table)
    use = Use(key)
    asking = asyncio.create_task(store.reserve(use, 100))
    assert await asyncio.to_thread(table.is_asked.wait, 60)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    store.settle(use, 0, 0.0)
    table.may_go_on.set()
    await store.close()
    with closing(KeyTable(tmp_path / "store")) as keys:
        (listed,) = keys.listed()
    assert (listed["requests_today"], listed["tokens_today"]) == (1, 0)


class BusyOnce(KeyTable):
    """A table that another process holds up for longer than SQLite waits, at its first transaction."""

    is_busy = True

    def transaction(self) -> AbstractContextManager[None]:
        if self.is_busy:
            self.is_busy = False
            raise sqlite3.OperationalError("database is locked")
        return super().transaction()


async def test_use_that_could_not_be_counted_is_counted_at_the_end(tmp_path: Path) -> None:
    with closing(KeyTable(tmp_path / "store")) as keys:
        keys.add("alice", {})
        (key,) = keys.valid().values()
        store = KeyStore(BusyOnce(tmp_path / "store"))
        use = Use(key)
        await store.reserve(use, 100)
        store.settle(use, 7, 0.5)
        await store.close()
        (listed,) = keys.listed()
    assert (listed["requests_today"], listed["tokens_today"], listed["cost_today"]) == (1, 7, 0.5)


GIVEN_UP = st.sampled_from([None, 0, 1, 3])  # turns of the event loop before the caller gives up


@settings(max_examples=40)
@given(requests=st.lists(st.tuples(st.integers(1, 40), GIVEN_UP), max_size=40))
def test_no_request_leaves_a_reservation(requests: list[tuple[int, int | None]]) -> None:
    async def one(store: KeyStore, use: Use, tokens: int, given_up: int | None) -> None:
        asking = asyncio.create_task(store.reserve(use, tokens))
        if given_up is not None:
            for _ in range(given_up):
                await asyncio.sleep(0)
            asking.cancel()
        (result,) = await asyncio.gather(asking, return_exceptions=True)
        assert result is None or isinstance(result, RateLimited | asyncio.CancelledError)
        store.settle(use, tokens // 2, 0.0)

    async def all_at_once(store: KeyStore, uses: list[Use]) -> None:
        await asyncio.gather(*(one(store, use, *request) for use, request in zip(uses, requests, strict=True)))
        await store.close()

    with TemporaryDirectory() as folder:
        table = KeyTable(Path(folder) / "store")
        table.add("alice", {"requests_per_day": 20, "tokens_per_day": 300})
        (key,) = table.valid().values()
        uses = [Use(key) for _ in requests]
        asyncio.run(all_at_once(KeyStore(KeyTable(Path(folder) / "store")), uses))
        (listed,) = table.listed()
        admitted = [tokens for (tokens, _), use in zip(requests, uses, strict=True) if use.admitted is not None]
        assert listed["requests_today"] == len(admitted) <= 20
        assert listed["tokens_today"] == sum(tokens // 2 for tokens in admitted) <= 300
        table.close()
