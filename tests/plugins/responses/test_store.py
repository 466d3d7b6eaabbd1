"""Tests the store of responses: it keeps what a plain list would keep, and the file survives what happens to it."""

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oaiserve.errors import StartupError, StoreFailed, Unavailable
from oaiserve.plugins.responses import store as responses_store
from oaiserve.plugins.responses.store import (
    ConversationTooLarge,
    ResponseDatabase,
    StoredDecoder,
    StoredResponse,
)
from oaiserve.plugins.shared import database
from oaiserve.plugins.shared.store_options import StoreLimits
from tests.databases import opened_databases
from tests.world.loop import World
from tests.world.schedules import schedules

ROOT = Path(__file__).parents[3]
MakeStore = Callable[..., ResponseDatabase]


def wide(number: int = 1000, num_bytes: int = 2**20, seconds: float = 1000) -> StoreLimits:
    return StoreLimits(number, num_bytes, seconds)


WIDE = wide()


WORLD = World(0)
run = WORLD.run_until_complete


class Clock:
    """The runtime of a store: the world, with a wall clock that a test moves."""

    now = 1_000_000.0
    executor = WORLD.executor

    def unix_ns(self) -> int:
        return int(self.now * 1e9)


def turn(response_id: str, previous_id: str | None = None, num_bytes: int = 10) -> StoredResponse:
    return StoredResponse(response_id, "talk", previous_id, b"r" * (num_bytes - 2), b"[]")


@pytest.fixture(params=["memory", "file"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    stores: list[ResponseDatabase] = []

    def make(limits: StoreLimits = WIDE, clock: Clock | None = None) -> ResponseDatabase:
        clock = clock or Clock()
        stores.append(ResponseDatabase(None if request.param == "memory" else tmp_path / "responses.db", limits, clock))
        return stores[-1]

    yield make
    for store in stores:
        run(store.close())


class ListStore:
    """What a store shall do, said as plainly as possible: a list of all responses, the oldest first."""

    def __init__(self, limits: StoreLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._rows: list[tuple[str, StoredResponse, float]] = []

    def put(self, owner: str, stored: StoredResponse) -> None:
        self._expire()
        if stored.num_bytes > self._limits.num_bytes:
            return
        chain = {turn.id for turn in self._before(owner, stored.previous_id)}
        used = [(o, turn, self._clock.now) for o, turn, _ in self._rows if o == owner and turn.id in chain]
        self._rows = [row for row in self._rows if not (row[0] == owner and row[1].id in chain)] + used
        self._rows.append((owner, stored, self._clock.now))
        while len(self._rows) > self._limits.number:
            self._drop_oldest_of(lambda rows: len(rows))
        while sum(row[1].num_bytes for row in self._rows) > self._limits.num_bytes:
            self._drop_oldest_of(lambda rows: sum(row[1].num_bytes for row in rows))

    def _drop_oldest_of(self, size: Callable[[list[Any]], int]) -> None:
        owners = {row[0] for row in self._rows}
        most = max(owners, key=lambda owner: (size([row for row in self._rows if row[0] == owner]), owner))
        self._rows.remove(next(row for row in self._rows if row[0] == most))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._expire()
        return next((turn for o, turn, _ in self._rows if (o, turn.id) == (owner, response_id)), None)

    def conversation(self, owner: str, response_id: str) -> list[StoredResponse]:
        turns = self._before(owner, response_id)
        return turns[::-1] if turns and turns[-1].previous_id is None else []

    def delete(self, owner: str, response_id: str) -> bool:
        stored_row = self.get(owner, response_id)
        self._rows = [row for row in self._rows if row[:2] != (owner, stored_row)]
        return stored_row is not None

    def counts(self) -> tuple[int, int]:
        return len(self._rows), sum(turn.num_bytes for _, turn, _ in self._rows)

    def _before(self, owner: str, response_id: str | None) -> list[StoredResponse]:
        turns = []
        while response_id is not None and (turn := self.get(owner, response_id)) is not None:
            turns.append(turn)
            response_id = turn.previous_id
        return turns

    def _expire(self) -> None:
        self._rows = [row for row in self._rows if row[2] > self._clock.now - self._limits.seconds]


OWNERS = st.sampled_from("abc")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), OWNERS, st.integers(2, 200), st.integers(0, 20)),
        st.tuples(st.sampled_from(["get", "conversation", "delete"]), OWNERS, st.integers(0, 20)),
        st.tuples(st.just("wait"), st.integers(1, 40)),
    ),
    max_size=30,
)
LIMITS = st.builds(StoreLimits, st.integers(0, 12), st.integers(50, 900), st.integers(20, 100))


# The turns of a conversation
ONE = ("put", "a", 10, 99)
TWO = ("put", "a", 10, 0)
THREE = ("put", "a", 10, 1)
FORK = [ONE, TWO, ("put", "a", 10, 0), ("conversation", "a", 1), ("conversation", "a", 2)]
LASTS = [ONE, ("wait", 60), TWO, ("wait", 60), THREE, ("wait", 60), ("conversation", "a", 2)]
FLOOD = [*[("put", "b", 10, 99)] * 4, *[("put", "a", 10, 99)] * 40]  # one owner, who pushes out only what is its own


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, limits=LIMITS)
@example(actions=FORK, limits=WIDE)
@example(actions=[ONE, TWO, THREE, ("delete", "a", 0), ("conversation", "a", 2)], limits=WIDE)
@example(actions=LASTS, limits=wide(seconds=100))
@example(actions=FLOOD, limits=wide(number=10))
@example(actions=[("put", "a", 10, 99), ("put", "a", 1001, 99)], limits=wide(num_bytes=1000))
@example(actions=[ONE, ("get", "b", 0), ("conversation", "b", 0), ("delete", "b", 0)], limits=WIDE)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_keeps_what_a_plain_list_keeps(kind: str, actions: list[Any], limits: StoreLimits) -> None:
    async def compare(store: ResponseDatabase, clock: Clock) -> None:
        plain = ListStore(limits, clock)
        ids = list[str]()
        num_deleted = 0
        for number, (action, *values) in enumerate(actions):
            if action == "wait":
                clock.now += values[0]
            elif action == "put":
                owner, size, previous = values
                previous_id = ids[previous] if previous < len(ids) else None
                # What a store finds is checked before, so a turn never goes on from one that is not there.
                if previous_id is not None and not plain.conversation(owner, previous_id):
                    previous_id = None
                ids.append(f"r{number}")
                stored = turn(ids[-1], previous_id, size)
                plain.put(owner, stored)
                await store.put(owner, stored)
                counts = store.counts()
                assert counts[:2] == plain.counts()
                assert counts.number + sum(counts.dropped.values()) + num_deleted == len(ids)
            else:
                owner, position = values
                response_id = ids[position] if position < len(ids) else "unknown"
                arguments = (owner, response_id, 10_000) if action == "conversation" else (owner, response_id)
                expected = getattr(plain, action)(owner, response_id)
                assert await getattr(store, action)(*arguments) == expected, action
                num_deleted += action == "delete" and expected
            for owner in "abc":
                for response_id in ids:
                    assert await store.get(owner, response_id) == plain.get(owner, response_id)

    clock = Clock()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "responses.db"
        store = ResponseDatabase(None if kind == "memory" else path, limits, clock)
        try:
            run(compare(store, clock))
        finally:
            run(store.close())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(wide(number=1), "room"), (wide(num_bytes=15), "room"), (wide(num_bytes=9), "size")],
)
def test_a_store_counts_why_it_drops(make_store: MakeStore, limits: StoreLimits, reason: str) -> None:
    store = make_store(limits)
    for number in range(3):
        run(store.put("me", turn(f"r{number}")))
    num_left = 0 if reason == "size" else 1
    assert store.counts() == (num_left, 10 * num_left, {"age": 0, "room": 0, "size": 0} | {reason: 3 - num_left})


def test_a_store_counts_what_became_too_old(make_store: MakeStore) -> None:
    clock = Clock()
    store = make_store(WIDE, clock)
    run(store.put("me", turn("old")))
    clock.now += WIDE.seconds
    run(store.put("me", turn("new")))
    assert store.counts() == (1, 10, {"age": 1, "room": 0, "size": 0})
    run(store.delete("me", "new"))
    assert store.counts()[:2] == (0, 0)


def test_a_response_is_replaced_only_as_it_is_known(make_store: MakeStore) -> None:
    store = make_store(wide(num_bytes=100))
    old = turn("1")
    new = turn("1", num_bytes=90)
    other = turn("1")

    async def replace() -> list[bool]:
        await store.put("a", old)
        await store.put("a", turn("2"))
        replacements = [("b", old, new), ("a", old, new), ("a", old, other)]
        return [await store.replace(*each) for each in replacements]

    assert run(replace()) == [False, True, False]
    assert (run(store.get("a", "1")), store.counts().number, store.counts().num_bytes) == (new, 2, 100)
    assert run(store.replace("a", new, turn("1", num_bytes=95)))  # The other one has to make room for this.
    assert (store.counts().number, store.counts().num_bytes, store.counts().dropped["room"]) == (1, 95, 1)


def test_a_response_that_is_stored_again_replaces_only_that_of_its_owner(make_store: MakeStore) -> None:
    store = make_store()
    first = turn("1")
    again = turn("1", num_bytes=30)

    async def put_all() -> list[StoredResponse | None]:
        for owner, stored in (("a", first), ("b", first), ("a", again)):
            await store.put(owner, stored)
        return [await store.get(owner, "1") for owner in "abc"]

    assert run(put_all()) == [again, first, None]
    assert store.counts() == (2, 40, dict.fromkeys(responses_store.DROP_REASONS, 0))


def test_a_conversation_that_is_larger_than_its_reader_can_take_is_refused(make_store: MakeStore) -> None:
    store = make_store()
    for stored in (turn("a", None, 600), turn("b", "a", 600)):
        run(store.put("", stored))
    with pytest.raises(ConversationTooLarge):
        run(store.conversation("", "b", 1199))
    assert len(run(store.conversation("", "b", 1200))) == 2


# The file.


@contextmanager
def opened(path: Path, limits: StoreLimits = WIDE) -> Iterator[ResponseDatabase]:
    store = ResponseDatabase(path, limits, Clock())
    try:
        yield store
    finally:
        run(store.close())


@contextmanager
def opened_connection(path: Path) -> Iterator[tuple[ResponseDatabase, sqlite3.Connection]]:
    with opened_databases() as connections, opened(path) as store:
        yield store, connections[str(path)][0]


def test_a_file_keeps_its_responses_for_the_next_process_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    with opened(path) as store:
        run(store.put("mine", turn("r1")))
    with opened(path) as store:
        assert run(store.get("mine", "r1")) == turn("r1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_deleted_is_not_in_the_file_any_more(tmp_path: Path) -> None:
    with opened(tmp_path / "responses.db") as store:
        run(store.put("", StoredResponse("r1", "r1", None, b"a secret of some length" * 500, b"[]")))
        assert b"secret" in b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert run(store.delete("", "r1"))
        assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_what_waits_for_the_disk_is_stored_in_one_transaction(tmp_path: Path) -> None:
    async def put_many(store: ResponseDatabase) -> list[StoredResponse | None]:
        await asyncio.gather(*(store.put("", turn(f"r{number}")) for number in range(50)))
        return [await store.get("", f"r{number}") for number in range(50)]

    statements: list[str] = []
    with opened_connection(tmp_path / "responses.db") as (store, connection):
        connection.set_trace_callback(statements.append)
        assert run(put_many(store)) == [turn(f"r{number}") for number in range(50)]
        connection.set_trace_callback(None)
    assert sum(statement.startswith("COMMIT") for statement in statements) < 50


@schedules(20)
def test_what_its_client_no_longer_waits_for_is_not_stored(world: World) -> None:
    async def put() -> list[StoredResponse | None]:
        left, stays = (asyncio.ensure_future(store.put("", turn(name))) for name in ("left", "stays"))
        await asyncio.sleep(0)  # Both wait for the thread.
        left.cancel()
        await stays
        return [await store.get("", name) for name in ("left", "stays")]

    store = ResponseDatabase(None, WIDE, world)
    assert world.run_until_complete(put()) == [None, turn("stays")]
    world.run_until_complete(store.close())


@schedules(200)
def test_each_put_whose_client_waits_for_it_is_stored_and_each_one_given_up_is_whole_or_not_there(world: World) -> None:
    draw = world.random

    async def put(number: int) -> bool:
        await asyncio.sleep(draw.random() / 10)
        await store.put("", turn(f"r{number}"))
        return True

    async def put_all() -> tuple[list[bool | BaseException], list[StoredResponse | None]]:
        puts = [asyncio.ensure_future(put(number)) for number in range(20)]
        for one in draw.sample(puts, 8):
            world.call_later(draw.random() / 5, one.cancel)
        results = await asyncio.gather(*puts, return_exceptions=True)
        return results, [await store.get("", f"r{number}") for number in range(20)]

    store = ResponseDatabase(None, WIDE, world)
    results, stored = world.run_until_complete(put_all())
    world.run_until_complete(store.close())
    for number, (result, found) in enumerate(zip(results, stored, strict=True)):
        assert found == turn(f"r{number}") or (found is None and isinstance(result, asyncio.CancelledError))


def test_an_error_of_the_disk_reaches_the_client_and_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large = turn("r1", None, 100_000)
    with opened_connection(tmp_path / "responses.db") as (store, connection):
        connection.execute("PRAGMA max_page_count = 1")  # as if the disk were full
        with pytest.raises(Unavailable, match="'store': false"):
            run(store.put("", large))
        connection.execute("PRAGMA max_page_count = 1000000")
        run(store.put("", large))
        assert run(store.get("", "r1")) == large
    assert "The response store does not work: database or disk is full" in caplog.text


def test_a_store_counts_again_what_another_one_has_stored_in_its_file(tmp_path: Path) -> None:
    one, other = stores = [ResponseDatabase(tmp_path / "responses.db", WIDE, Clock()) for _ in range(2)]
    run(one.put("", turn("r0")))
    assert other.counts().number == 0
    assert other.recounted()[:2] == other.counts()[:2] == (1, 10)
    for store in stores:
        run(store.close())


def test_room_for_a_response_is_found_out_by_storing_one_of_its_size(tmp_path: Path) -> None:
    with opened_connection(tmp_path / "responses.db") as (store, connection):
        run(store.put("", turn("r0")))
        before = store.counts()
        run(store.check_room("", turn("r1")))
        assert run(store.get("", "r1")) is None
        assert store.counts() == before
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")  # as if the disk were full
        run(store.check_room("", turn("r1")))
        with pytest.raises(Unavailable):
            run(store.check_room("", turn("r1")._replace(input_items=bytes(100_000))))


def _changed(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute(statement)


def _overwrite(path: Path, start: int, num_bytes: int) -> None:
    content = bytearray(path.read_bytes())
    content[start : start + num_bytes] = b"\xa5" * num_bytes
    path.write_bytes(content)


SPOILS: dict[str, Callable[[Path], Any]] = {
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "text": lambda path: path.write_text("Not a database, and longer than its header would be. " * 10),
    "database of another program": lambda path: _changed(path, "PRAGMA application_id = 7"),
    "other columns": lambda path: _changed(path, "ALTER TABLE responses ADD COLUMN later TEXT"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5000]),
    "first page": lambda path: _overwrite(path, 100, 3900),
    "later pages": lambda path: _overwrite(path, 8192, path.stat().st_size - 8192),
    "last page": lambda path: _overwrite(path, path.stat().st_size - 4096, 4096),
}


@pytest.mark.parametrize("kind", SPOILS)
def test_a_file_that_is_no_sound_store_ends_the_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "responses.db"
    with opened(path) as store:
        for number in range(50):
            run(store.put("", turn(f"r{number}", num_bytes=2000)))
    responses_store.check(path)
    SPOILS[kind](path)
    with pytest.raises(StartupError, match=f"^--response-store is '{path}', which [^\n]*[.]$"):
        responses_store.check(path)


def test_a_store_that_is_spoiled_while_it_is_used_fails_for_its_clients(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    with opened(path) as store:
        for number in range(50):
            run(store.put("", turn(f"r{number}", num_bytes=2000)))
    with opened(path) as store:
        _overwrite(path, 4096, path.stat().st_size - 4096)
        for call in (store.put("", turn("new")), store.get("", "r1"), store.delete("", "r1")):
            with pytest.raises(StoreFailed, match="the server's log says why"):
                run(call)  # type: ignore[arg-type]


def test_content_that_is_spoiled_in_a_store_fails_for_its_client() -> None:
    with pytest.raises(StoreFailed):
        StoredDecoder(dict[str, str]).decode(b'{"a": \xff')


WRITER = """
import asyncio, sys
from pathlib import Path
from oaiserve.plugins.responses.store import ResponseDatabase, StoredResponse
from oaiserve.runtime import THREADS
from oaiserve.plugins.shared.store_options import StoreLimits

async def write(path, name, number):
    store = ResponseDatabase(Path(path), StoreLimits(100_000, 2**30, 1000), THREADS)
    for k in range(number):
        await store.put("", StoredResponse(f"{name}-{k}", "talk", f"{name}-{k - 1}" if k else None, b"{}", b"[]"))
        print(k, flush=True)  # as an answer that has been sent
    await store.close()

asyncio.run(write(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def writer(path: Path, name: str, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(number)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


OPENS_A_NEW_FILE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("opened", flush=True)
sys.stdin.readline()
connection.execute("COMMIT")
"""


def test_a_new_file_may_be_opened_by_another_process_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that start together find no file, and SQLite does not wait by itself for the switch to a log."""
    path = tmp_path / "responses.db"
    other = subprocess.Popen(
        [sys.executable, "-c", OPENS_A_NEW_FILE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"opened\n"
    waits = []

    def until_the_other_is_done(seconds: float) -> None:
        waits.append(seconds)
        other.communicate(b"go on\n")

    monkeypatch.setattr(database.time, "sleep", until_the_other_is_done)
    responses_store.check(path)
    assert len(waits) == 1


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    with writer(path, "a", 30) as one, writer(path, "b", 30) as other:
        for process in (one, other):
            assert process.stdout is not None
            assert len(process.stdout.readlines()) == 30
    assert (one.returncode, other.returncode) == (0, 0)
    with opened(path) as store:
        for name in "ab":
            turns = run(store.conversation("", f"{name}-29", 2**20))
            assert [stored.id for stored in turns] == [f"{name}-{k}" for k in range(30)]
