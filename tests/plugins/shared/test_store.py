"""A store works on a thread of its own, which it has from the beginning."""

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from oaiserve.errors import StoreFailed
from oaiserve.plugins.shared.store import Store
from oaiserve.plugins.shared.store_options import StoreLimits
from oaiserve.runtime import THREADS
from tests.world.loop import World
from tests.world.schedules import schedules

LIMITS = StoreLimits(1, 1, 1.0)


def test_a_store_needs_no_more_threads_to_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is a real one."""
    connection = sqlite3.connect(tmp_path / "store", check_same_thread=False)
    store = Store(connection, "notes", LIMITS, THREADS)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(store.close())
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")


@schedules(50)
def test_work_is_done_one_after_the_other_and_all_of_it_before_the_end(world: World) -> None:
    draw = world.random
    done: list[int] = []

    def work(number: int) -> int:
        world.sleep(draw.choice([0.0, 0.01]))
        done.append(number)
        return number

    async def work_and_close() -> list[int]:
        store = Store(sqlite3.connect(":memory:"), "notes", LIMITS, world)
        working = [asyncio.ensure_future(store.do(lambda number=number: work(number))) for number in range(10)]
        await asyncio.sleep(draw.random() / 10)
        await store.close()
        return await asyncio.gather(*working)

    assert world.run_until_complete(work_and_close()) == done == [*range(10)]


@schedules(5)
def test_an_error_of_the_database_is_one_for_clients(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        store = Store(connection, "notes", LIMITS, world)
        with pytest.raises(StoreFailed, match="'store': false"):
            world.run_until_complete(store.do(lambda: connection.execute("SELECT * FROM missing")))
    assert "no such table: missing" in caplog.text
