"""The store of files and batches: all that it keeps counts for its limit, in shares by key, and lists stay small."""

import asyncio
import json
from io import BytesIO
from pathlib import Path
from uuid import uuid4

import pytest

from oaiserve.config import Config
from oaiserve.errors import InvalidRequest, NotFound, Overloaded, StartupError
from oaiserve.plugin_loading import check, own_plugins
from oaiserve.plugins.batches import store as batch_store
from oaiserve.plugins.batches.objects import BatchObject, BatchUsage, Counts, FileObject, Line
from oaiserve.plugins.batches.store import LINE_BYTES, ROW_BYTES, BatchStore, Owned, Result
from oaiserve.plugins.shared.store_options import StoreLimits, StoreOptions
from tests.databases import opened_databases
from tests.world.loop import World
from tests.world.schedules import schedules


async def stored_file(store: BatchStore, owner: str = "", content: bytes = b"{}") -> int:
    """Store a file, and return its number."""
    file = FileObject(id=f"file-{uuid4().hex}", bytes=len(content), created_at=0, filename="a", purpose="batch")
    await store.add_file(owner, file, BytesIO(content))
    stored = await store.file(owner, file.id)
    assert stored is not None
    return stored[1]


def batch_of(name: str) -> BatchObject:
    return BatchObject(
        id=name,
        endpoint="/v1/completions",
        input_file_id="f",
        created_at=0,
        expires_at=0,
        request_counts=Counts(total=1),
    )


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def total_bytes(store: BatchStore) -> int:
    """Return the bytes of the owner "", who has all of a store."""
    with pytest.raises(InvalidRequest) as refused:
        await store.check_room("", 10**6 + 1)
    return int(str(refused.value).partition("Yours have ")[2].split()[0])


@schedules(20)
def test_an_answer_that_nobody_waits_for_any_more_is_kept_and_keeps_no_other_one_waiting(world: World) -> None:
    async def answers_kept() -> list[int]:
        owned = [Owned(batch_of(name), "", await stored_file(store)) for name in ("left", "stays")]
        for one in owned:
            await store.add_batch(one, [Line(1, "a", 0, 2)])
        before = asyncio.create_task(store.files("", None, 9, None))
        left, stays = (asyncio.create_task(store.put(one, Result(1, b"{}\n", BatchUsage()))) for one in owned)
        for _ in range(3):
            await asyncio.sleep(0)  # By then both writes wait for the thread.
        left.cancel()
        await asyncio.wait([left])
        await asyncio.gather(before, stays)
        return [batch.request_counts.completed for batch in await store.batches("", 9, None)]

    store = BatchStore(None, StoreLimits(1, 10**6, 3600.0), world)
    assert world.run_until_complete(answers_kept()) == [1, 1]
    world.run_until_complete(store.close())


async def test_names_lines_and_answers_count_for_the_limit_and_deleting_gives_their_room_back(world: World) -> None:
    store = BatchStore(None, StoreLimits(1, 10**6, 3600.0), world)
    number = await stored_file(store, content=b"x" * 1000)
    assert await total_bytes(store) == 1000 + 1 + ROW_BYTES
    one = Owned(batch_of("b"), "", number)
    await store.add_batch(one, [Line(n, "ab", 0, 1000) for n in (1, 2, 3)])
    before = await total_bytes(store)
    assert before > 1000 + 2 * ROW_BYTES + 3 * LINE_BYTES
    assert before < 3000 + 2 * ROW_BYTES + 3 * LINE_BYTES, "the lines of the file are not copied"
    await store.put(one, Result(1, b"y" * 5000, BatchUsage()))
    assert await total_bytes(store) == before + 5000
    await store.end(one, "completed", "late", "Too late.")
    files = await store.files("", None, 9, None)
    assert [file.purpose for file in files] == ["batch_output", "batch_output", "batch"]
    for file in files:
        assert await store.delete_file("", file.id)
    assert await total_bytes(store) < before - 1000
    await store.close()


async def test_an_answer_without_room_becomes_an_error_of_its_line(world: World) -> None:
    store = BatchStore(None, StoreLimits(1, 20_000, 3600.0), world)
    one = Owned(batch_of("b"), "", await stored_file(store))
    await store.add_batch(one, [Line(1, "a", 0, 2), Line(2, "b", 0, 2)])
    await store.put(one, Result(1, b"y" * 10_000, BatchUsage()))
    await store.put(one, Result(2, b"y" * 10_000, BatchUsage()))
    await store.end(one, "completed")
    counts = one.batch.request_counts
    content, _ = await store.done_lines("b", 1)
    await store.close()
    assert (counts.completed, counts.failed, json.loads(content)["error"]["code"]) == (1, 1, "no_room")


async def test_one_key_cannot_take_the_share_of_another(world: World) -> None:
    store = BatchStore(None, StoreLimits(1, 100_000, 3600.0), world)
    await stored_file(store, "greedy", b"x" * 98_000)
    with pytest.raises(InvalidRequest, match="Yours have 99025 already"):
        await stored_file(store, "greedy", b"x" * 2000)
    await stored_file(store, "modest", b"x" * 40_000)
    with pytest.raises(InvalidRequest, match="in shares by API key"):
        await stored_file(store, "modest", b"x" * 20_000)
    await store.close()


async def test_a_file_that_is_deleted_under_its_batch_stays_readable_and_counted_until_the_batch_ends(
    world: World,
) -> None:
    store = BatchStore(None, StoreLimits(1, 10**6, 3600.0), world)
    number = await stored_file(store, content=b"0123456789")
    one = Owned(batch_of("b"), "", number)
    await store.add_batch(one, [Line(1, "a", 2, 5)])
    (file,) = await store.files("", None, 9, None)
    assert await store.delete_file("", file.id)
    assert await store.files("", None, 9, None) == []
    assert await store.file("", file.id) is None
    assert not await store.delete_file("", file.id)
    assert await store.slice(number, 2, 5) == b"23456"
    await store.end(one, "cancelled")
    assert await store.slice(number, 2, 5) == b""
    with pytest.raises(NotFound, match="was deleted"):
        await store.add_batch(Owned(batch_of("c"), "", number), [Line(1, "a", 2, 5)])
    await store.close()


async def test_nothing_on_the_disk_has_the_answers_of_a_batch_that_is_deleted(tmp_path: Path, world: World) -> None:
    store = BatchStore(tmp_path / "store", StoreLimits(1, 10**6, 3600.0), world)
    one = Owned(batch_of("msgbatch_a"), "", await stored_file(store))
    await store.add_batch(one, [Line(1, "a", 0, 2)])
    await store.put(one, Result(1, b"an answer\n", BatchUsage()))
    await store.end(one, "completed")
    assert b"an answer" in on_disk(tmp_path)
    assert await store.delete_batch("", one.batch.id)
    assert b"an answer" not in on_disk(tmp_path)
    await store.close()


async def test_batch_that_another_server_has_ended_and_deleted_has_ended(tmp_path: Path, world: World) -> None:
    limits = StoreLimits(1, 10**6, 3600.0)
    one, other = (BatchStore(tmp_path / "responses.db", limits, world) for _ in range(2))
    owned = Owned(batch_of("b"), "", await stored_file(one))
    await one.add_batch(owned, [Line(1, "a", 0, 2)])
    assert await other.end(Owned(batch_of("b"), ""), "cancelled")
    assert await other.delete_batch("", "b")
    await one.put(owned, Result(1, b"{}\n", BatchUsage()))
    has_ended = await one.end(owned, "completed")
    await one.close()
    await other.close()
    assert not has_ended


async def test_batches_under_way_are_limited_by_key(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(batch_store, "MOST_OPEN_BATCHES", 2)
    store = BatchStore(None, StoreLimits(1, 10**6, 3600.0), world)
    number = await stored_file(store)
    for name in "ab":
        await store.add_batch(Owned(batch_of(name), "", number), [Line(1, "a", 0, 2)])
    with pytest.raises(Overloaded, match="2 of your batches are under way"):
        await store.add_batch(Owned(batch_of("c"), "", number), [Line(1, "a", 0, 2)])
    await store.add_batch(Owned(batch_of("c"), "other", await stored_file(store, "other")), [Line(1, "a", 0, 2)])
    await store.close()


async def test_any_part_of_a_file_is_read_wherever_pieces_end(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(batch_store, "PIECE_BYTES", 4)
    store = BatchStore(None, StoreLimits(1, 10**8, 3600.0), world)
    content = bytes(range(13))
    number = await stored_file(store, content=content)
    for start in range(14):
        for end in range(start, 14):
            assert await store.slice(number, start, end - start) == content[start:end]
    assert b"".join([part async for part in store.content(number)]) == content
    await store.close()


async def test_a_page_of_a_list_reads_only_its_own_rows(world: World) -> None:
    with opened_databases() as connections:
        store = BatchStore(None, StoreLimits(1, 10**8, 3600.0), world)
    for _ in range(200):
        await stored_file(store)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    connections[""][0].set_progress_handler(count, 1)
    page = await store.files("", None, 2, None)
    following = await store.files("", None, 2, page[1].id)
    await store.close()
    assert len({file.id for file in page + following}) == 4
    assert steps < 300, "it has nothing to do with the number of files"


def test_a_lock_that_cannot_be_opened_stops_the_start_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "store-batches").mkdir()
    config = Config("demo", of_plugins=(StoreOptions(response_store=tmp_path / "store"),))
    with pytest.raises(StartupError, match="store-batches', next to --response-store, cannot be opened"):
        check(own_plugins(), config)
