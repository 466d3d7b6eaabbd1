"""Tests that requests which ask at once, and are given up at any moment, leave nothing reserved."""

import asyncio
import sqlite3
from contextlib import AbstractContextManager, closing
from pathlib import Path

from oaiserve.errors import RateLimited
from oaiserve.plugins.keys.key_store import KeyStore
from oaiserve.plugins.keys.key_table import KeyTable, Use
from tests.world.loop import World
from tests.world.schedules import schedules


@schedules(20)
def test_a_request_that_is_given_up_while_it_is_admitted_is_settled_after_that(world: World, tmp_path: Path) -> None:
    class Slow(KeyTable):
        def reserve(self, use: Use, tokens: int) -> None:
            world.sleep(10.0)
            super().reserve(use, tokens)
            admitted.append(tokens)

    async def give_up() -> None:
        asking = asyncio.ensure_future(store.reserve(use, 100))
        await asyncio.sleep(5.0)
        assert admitted == [100]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        store.settle(use, 0, 0.0)
        await store.close()

    admitted: list[int] = []
    table = Slow(tmp_path / f"store {world.seed}", lambda: world.unix_ns() / 1e9)
    table.add("alice", {"tokens_per_day": 300})
    (key,) = table.valid().values()
    store = KeyStore(table, world)
    use = Use(key)
    world.run_until_complete(give_up())
    with closing(KeyTable(tmp_path / f"store {world.seed}", lambda: world.unix_ns() / 1e9)) as keys:
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


@schedules(10)
def test_use_that_could_not_be_counted_is_counted_at_the_end(world: World, tmp_path: Path) -> None:
    async def use_and_close() -> None:
        await store.reserve(use, 100)
        store.settle(use, 7, 0.5)
        await store.close()

    path = tmp_path / f"store {world.seed}"
    with closing(KeyTable(path, lambda: world.unix_ns() / 1e9)) as keys:
        keys.add("alice", {})
        (key,) = keys.valid().values()
        store = KeyStore(BusyOnce(path, lambda: world.unix_ns() / 1e9), world)
        use = Use(key)
        world.run_until_complete(use_and_close())
        (listed,) = keys.listed()
    assert (listed["requests_today"], listed["tokens_today"], listed["cost_today"]) == (1, 7, 0.5)


@schedules(60)
def test_no_request_leaves_a_reservation(world: World, tmp_path: Path) -> None:
    draw = world.random

    async def one(use: Use, tokens: int) -> None:
        await asyncio.sleep(draw.random() / 10)
        asking = asyncio.ensure_future(store.reserve(use, tokens))
        if draw.random() < 0.75:
            world.call_later(draw.choice([0.0, draw.random() / 100, draw.random() / 5]), asking.cancel)
        (result,) = await asyncio.gather(asking, return_exceptions=True)
        assert result is None or isinstance(result, RateLimited | asyncio.CancelledError)
        store.settle(use, tokens // 2, 0.0)

    async def all_at_once() -> None:
        await asyncio.gather(*(one(use, tokens) for use, tokens in zip(uses, requests, strict=True)))
        await store.close()

    path = tmp_path / f"store {world.seed}"
    table = KeyTable(path, lambda: world.unix_ns() / 1e9)
    table.add("alice", {"requests_per_day": 20, "tokens_per_day": 300})
    (key,) = table.valid().values()
    requests = [draw.randint(1, 40) for _ in range(draw.randint(0, 40))]
    uses = [Use(key) for _ in requests]
    store = KeyStore(KeyTable(path, lambda: world.unix_ns() / 1e9), world)
    world.run_until_complete(all_at_once())
    (listed,) = table.listed()
    admitted = [tokens for tokens, use in zip(requests, uses, strict=True) if use.admitted is not None]
    assert listed["requests_today"] == len(admitted) <= 20
    assert listed["tokens_today"] == sum(tokens // 2 for tokens in admitted) <= 300
    table.close()
