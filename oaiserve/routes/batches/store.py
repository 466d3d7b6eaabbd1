"""The files and batches of clients, in the database of responses: `BatchStore`, in SQLite on a thread of its own.

The answer to a line is written in one transaction, and is by itself the mark that the line is done: whenever the
process ends, no line is lost and none is answered twice. The store knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import msgspec

from oaiserve.errors import InvalidRequest, StartupError
from oaiserve.files import database
from oaiserve.files.group_commit import GroupCommit
from oaiserve.files.private import FILE_MODE
from oaiserve.routes.batches.objects import BatchObject, BatchUsage, FileObject, Line, Status, given_up
from oaiserve.routes.responses.store import StoreLimits, reported

T = TypeVar("T")
PAGE_LINES = 64  # that are read at once

_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    object BLOB NOT NULL,
    content BLOB, -- NULL: the answers of a batch, in batch_lines
    batch TEXT,
    failed INTEGER -- whether those that failed
)
""",
    """
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    is_open INTEGER NOT NULL,
    object BLOB NOT NULL
)
""",
    """
CREATE TABLE IF NOT EXISTS batch_lines (
    batch TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    request BLOB NOT NULL,
    result BLOB, -- NULL: it is not done
    failed INTEGER,
    done INTEGER, -- its place in the order in which lines were done
    PRIMARY KEY (batch, number)
)
""",
    "CREATE INDEX IF NOT EXISTS by_done ON batch_lines (batch, done)",
)


class Owned(NamedTuple):
    """A batch, and whose it is: the digest of a key, or "" without keys."""

    batch: BatchObject
    owner: str


class Result(NamedTuple):
    """The answer to a line."""

    number: int
    content: bytes  # a line of the output
    usage: BatchUsage | None  # None: it has failed


class BatchStore:
    """Files and batches by owner, in the file of responses, or without a path in memory.

    They are kept for as long as responses, and files have at most as many bytes as these.
    """

    def __init__(self, path: Path | None, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        """Open the file. Raises StartupError."""
        self._limits = limits
        self._clock = clock
        self._connection = database.opened(path, _SCHEMA)
        self._thread = ThreadPoolExecutor(1, "batch-store")
        self._commits = GroupCommit(self._thread, self._put_all)
        try:
            self._lock = None if path is None else os.open(f"{path}-batches", os.O_RDWR | os.O_CREAT, FILE_MODE)
        except OSError as error:
            raise StartupError(
                f"'{path}-batches', beside --response-store, cannot be opened: {error.strerror}."
            ) from error
        self.is_shared = path is not None  # other processes may have the file, too
        self._computes = self._lock is None

    async def close(self) -> None:
        await self._do(self._connection.close)
        self._thread.shutdown()
        if self._lock is not None:
            os.close(self._lock)

    def may_compute(self) -> bool:
        """Return whether this process computes batches: of those with one file, the one that holds the lock."""
        if not self._computes and self._lock is not None:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._computes = True
        return self._computes

    async def _do(self, work: Callable[[], T]) -> T:
        with reported():
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- files --------------------------------------------------------------------------------------------------------

    async def add_file(self, owner: str, file: FileObject, content: bytes | bytearray) -> None:
        """Keep a file, unless a server that ended before it could answer has kept it. Raises InvalidRequest if there is
        no room."""
        await self._do(partial(self._add_file, owner, file, content))

    async def files(self, owner: str, file_id: str | None = None) -> list[FileObject]:
        """Return the files of an owner, newest first, or only the one of this id."""
        query = "SELECT object FROM files WHERE owner = ? AND created_at > ? AND id = coalesce(?, id)"
        return await self._do(lambda: self._newest_first(FileObject, query, owner, self._oldest(), file_id))

    async def delete_file(self, owner: str, file_id: str) -> bool:
        return await self._do(partial(self._delete_file, owner, file_id))

    async def content(self, owner: str, file_id: str, after: int = 0) -> tuple[bytes, int | None] | None:
        """Return a part of a file's content, and where the next one begins, or None; None for a file of nobody."""
        return await self._do(partial(self._content, owner, file_id, after))

    def _add_file(self, owner: str, file: FileObject, content: bytes | bytearray) -> None:
        execute, oldest = self._connection.execute, self._oldest()
        with database.transaction(self._connection):
            if self._has("files", owner, file.id):
                return
            execute(
                "DELETE FROM batch_lines WHERE batch IN (SELECT id FROM batches WHERE created_at <= ? AND NOT is_open)",
                (oldest,),
            )
            execute("DELETE FROM batches WHERE created_at <= ? AND NOT is_open", (oldest,))
            execute("DELETE FROM files WHERE created_at <= ?", (oldest,))
            ((taken,),) = self._all("SELECT coalesce(sum(num_bytes), 0) FROM files")
            if taken + len(content) > self._limits.num_bytes:
                raise InvalidRequest(
                    f"Files may have {self._limits.num_bytes} bytes together (--response-store-bytes), there are "
                    f"{taken} already, and this one has {len(content)}. Delete some, or send less.",
                    param="file",
                )
            self._insert_file(owner, file, content)

    def _insert_file(
        self,
        owner: str,
        file: FileObject,
        content: bytes | bytearray | None,
        batch: str | None = None,
        failed: bool | None = None,
    ) -> None:
        self._connection.execute(
            "INSERT INTO files (owner, id, created_at, num_bytes, object, content, batch, failed)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (owner, file.id, self._clock(), file.bytes, msgspec.json.encode(file), content, batch, failed),
        )

    def _delete_file(self, owner: str, file_id: str) -> bool:
        execute = self._connection.execute
        with database.transaction(self._connection):
            execute(
                "DELETE FROM batch_lines WHERE (batch, failed) IN"
                " (SELECT batch, failed FROM files WHERE owner = ? AND id = ? AND batch IS NOT NULL)",
                (owner, file_id),
            )
            found = execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner, file_id)).rowcount
        execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the log beside the file would still have it
        return found > 0

    def _content(self, owner: str, file_id: str, after: int) -> tuple[bytes, int | None] | None:
        found = self._all(
            "SELECT content, batch, failed FROM files WHERE owner = ? AND id = ? AND created_at > ?",
            *(owner, file_id, self._oldest()),
        )
        if not found or found[0][1] is None:
            return (found[0][0], None) if found else None
        rows = self._all(
            "SELECT number, result FROM batch_lines WHERE batch = ? AND failed = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            *(*found[0][1:], after, PAGE_LINES),
        )
        return b"".join(content for _, content in rows), rows[-1][0] if rows else None

    # -- batches ------------------------------------------------------------------------------------------------------

    async def add_batch(self, owned: Owned, lines: list[Line]) -> None:
        """Keep a batch, unless a server that ended before it could answer has kept it."""
        await self._do(partial(self._add_batch, owned, lines))

    async def batches(self, owner: str, batch_id: str | None = None) -> list[BatchObject]:
        """Return the batches of an owner, newest first, or only the one of this id."""
        query = "SELECT object FROM batches WHERE owner = ? AND (is_open OR created_at > ?) AND id = coalesce(?, id)"
        return await self._do(lambda: self._newest_first(BatchObject, query, owner, self._oldest(), batch_id))

    async def open_batches(self) -> list[Owned]:
        """Return all batches that have not ended, oldest first."""
        query = "SELECT object, owner FROM batches WHERE is_open ORDER BY number"
        rows = await self._do(lambda: self._all(query))
        return [Owned(msgspec.json.decode(row, type=BatchObject), owner) for row, owner in rows]

    async def next_lines(self, batch_id: str, after: int) -> list[Line]:
        """Return the next lines behind a number that are not done."""
        query = (
            "SELECT number, custom_id, request FROM batch_lines WHERE batch = ? AND result IS NULL AND number > ?"
            " ORDER BY number LIMIT ?"
        )
        return [Line(*row) for row in await self._do(lambda: self._all(query, batch_id, after, PAGE_LINES))]

    async def done_lines(self, batch_id: str, after: int) -> tuple[bytes, int]:
        """Return answers in the order in which they came, behind so many, and how many come before the next ones."""
        query = "SELECT result FROM batch_lines WHERE batch = ? AND done > ? ORDER BY done LIMIT ?"
        rows = await self._do(lambda: self._all(query, batch_id, after, 16 * PAGE_LINES))
        return b"".join(content for (content,) in rows), after + len(rows)

    async def put(self, batch: BatchObject, answered: Result) -> None:
        """Keep the answer to a line, and count it in the batch. When this returns, no crash loses it."""
        with reported():  # an answer that is there is kept, even if its batch is cancelled or the server ends
            await asyncio.shield(self._commits.put((batch, answered)))

    async def end(self, owned: Owned, status: Status, code: str = "", message: str = "") -> bool:
        """End a batch, and give up the lines that are not done with this error. Return False if it has ended."""
        return await self._do(partial(self._end, owned, status, code, message))

    def _add_batch(self, owned: Owned, lines: list[Line]) -> None:
        batch = owned.batch
        with database.transaction(self._connection):
            if self._has("batches", owned.owner, batch.id):
                return
            self._connection.execute(
                "INSERT INTO batches (owner, id, created_at, is_open, object) VALUES (?, ?, ?, ?, ?)",
                (owned.owner, batch.id, self._clock(), bool(lines), msgspec.json.encode(batch)),
            )
            self._connection.executemany(
                "INSERT INTO batch_lines (batch, number, custom_id, request) VALUES (?, ?, ?, ?)",
                ((batch.id, *line[:3]) for line in lines),
            )

    def _put_all(self, waiting: list[tuple[BatchObject, Result]]) -> None:
        batches = {batch.id: batch for batch, _ in waiting}
        try:
            with database.transaction(self._connection):
                for batch, answered in waiting:
                    self._put(batch, answered)
                for batch in batches.values():
                    self._write(batch)
        except Exception:
            for batch in batches.values():
                self._read_counts(batch)
            raise

    def _read_counts(self, batch: BatchObject) -> bool:
        """Give a batch the counts that are stored, and return whether it has not ended."""
        ((row, is_open),) = self._all("SELECT object, is_open FROM batches WHERE id = ?", batch.id)
        kept = msgspec.json.decode(row, type=BatchObject)
        batch.request_counts, batch.usage = kept.request_counts, kept.usage
        return bool(is_open)

    def _put(self, batch: BatchObject, answered: Result) -> None:
        number, content, usage = answered
        counts, whole = batch.request_counts, batch.usage
        marked = self._connection.execute(
            "UPDATE batch_lines SET result = ?, failed = ?, done = ?, request = x''"
            " WHERE batch = ? AND number = ? AND result IS NULL",
            (content, usage is None, counts.completed + counts.failed + 1, batch.id, number),
        )
        if not marked.rowcount:
            return  # it was given up meanwhile
        if usage is None:
            counts.failed += 1
            return
        counts.completed += 1
        whole.input_tokens += usage.input_tokens
        whole.output_tokens += usage.output_tokens
        whole.total_tokens += usage.total_tokens
        whole.input_tokens_details.cached_tokens += usage.input_tokens_details.cached_tokens
        whole.output_tokens_details.reasoning_tokens += usage.output_tokens_details.reasoning_tokens

    def _write(self, batch: BatchObject) -> None:
        query = "UPDATE batches SET object = ? WHERE id = ? AND is_open"  # another process may have ended it
        self._connection.execute(query, (msgspec.json.encode(batch), batch.id))

    def _end(self, owned: Owned, status: Status, code: str, message: str) -> bool:
        batch, now = owned.batch, int(self._clock())
        with database.transaction(self._connection):
            if not self._read_counts(batch):
                return False
            rest = self._all("SELECT number, custom_id FROM batch_lines WHERE batch = ? AND result IS NULL", batch.id)
            for number, custom_id in rest:
                self._put(batch, Result(number, given_up(batch.id, number, custom_id, code, message), None))
            for failed, name in enumerate(("output_file_id", "error_file_id")):
                ((num_lines, num_bytes),) = self._all(
                    "SELECT count(*), sum(length(result)) FROM batch_lines WHERE batch = ? AND failed = ?",
                    *(batch.id, failed),
                )
                if num_lines:
                    file_id, filename = f"file-{uuid4().hex}", f"{batch.id}_{name[:-8]}.jsonl"
                    file = FileObject(
                        id=file_id, bytes=num_bytes, created_at=now, filename=filename, purpose="batch_output"
                    )
                    self._insert_file(owned.owner, file, None, batch.id, bool(failed))
                    setattr(batch, name, file_id)
            batch.end(status, now)
            self._write(batch)
            self._connection.execute("UPDATE batches SET is_open = 0 WHERE id = ?", (batch.id,))
        return True

    def _has(self, table: str, owner: str, name: str) -> bool:
        return bool(self._all(f"SELECT 1 FROM {table} WHERE owner = ? AND id = ?", owner, name))

    def _oldest(self) -> float:
        return self._clock() - self._limits.seconds

    def _newest_first(self, kind: type[T], query: str, *values: object) -> list[T]:
        return [msgspec.json.decode(row, type=kind) for (row,) in self._all(f"{query} ORDER BY number DESC", *values)]

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()
