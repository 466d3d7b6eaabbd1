"""The files and batches of clients, in the database of responses: `BatchStore`, in SQLite on a separate thread.

The answer to a line is written in one transaction, and its existence marks the line as done. So whenever the process
ends, no line is lost and none is answered twice. A file's content is stored once, in pieces, and is never in memory as
a whole: a batch refers to the lines of its file. The store knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec

from oaiserve.errors import InvalidRequest, NotFound, Overloaded, StartupError
from oaiserve.http.shared_limit import SharedLimit, is_within_share
from oaiserve.plugins.batches.objects import BatchObject, BatchUsage, FileObject, Line, Status, given_up
from oaiserve.plugins.batches.tables import SCHEMA
from oaiserve.plugins.shared import database
from oaiserve.plugins.shared.group_commit import GroupCommit
from oaiserve.plugins.shared.store import Store, on_thread, reported
from oaiserve.plugins.shared.store_options import StoreLimits
from oaiserve.runtime import Runtime
from oaiserve.storage.private import FILE_MODE

T = TypeVar("T")
PIECE_BYTES = 2**18  # bytes of a file's content that are read at once
PAGE_LINES = 64  # lines that are read at once
PAGE_BYTES = 2**20  # bytes of answers that are read at once, unless there is only one
ROW_BYTES = 1024  # charged for a file or a batch in addition to its content
LINE_BYTES = 256  # charged for each line of a batch
MOST_OPEN_BATCHES = 100  # limit for each owner
MOST_ARRIVING = 64  # files at once
MESSAGE_BATCHES = "msgbatch_"  # the beginning of ids of batches of messages
NO_ROOM = ("no_room", "The answer to this request did not fit into the store (--response-store-bytes).")

_OF_MESSAGES = f"id GLOB '{MESSAGE_BATCHES}*'"  # condition on a batch
_UNREAD = "number NOT IN (SELECT file FROM stored_batches WHERE is_open)"  # condition on a file

_NEXT_LINES = (
    "SELECT number, custom_id, start, num_bytes FROM stored_lines WHERE batch = ? AND result IS NULL AND number > ?"
    " ORDER BY number LIMIT ?"
)


class Owned(NamedTuple):
    """A batch, its owner (the digest of a key, or "" without keys), and the number of its input file."""

    batch: BatchObject
    owner: str
    file: int = 0


class Result(NamedTuple):
    """The answer to a line."""

    number: int
    content: bytes  # a line of the output
    usage: BatchUsage | None  # None: the request has failed


def opened_lock(path: Path) -> int:
    """Return a descriptor of the file whose lock decides which process computes batches. Raises StartupError."""
    try:
        return os.open(f"{path}-batches", os.O_RDWR | os.O_CREAT, FILE_MODE)
    except OSError as error:
        raise StartupError(
            f"'{path}-batches', next to --response-store, cannot be opened: {error.strerror}."
        ) from error


class BatchStore(Store):
    """Files and batches by owner, in the file of responses, or in a temporary file if there is no path.

    They are kept for as long as responses. Together they may have at most as many bytes as these, in shares by owner.
    """

    def __init__(self, path: Path | None, limits: StoreLimits, runtime: Runtime) -> None:
        """Open the file. Raises StartupError."""
        connection = database.opened(path, SCHEMA, without_path="")
        super().__init__(connection, "batch-store", limits, runtime)
        self._folder = None if path is None else str(path.parent)
        self._commits = GroupCommit(self._thread, self._put_all)
        self._lock = None if path is None else opened_lock(path)
        self.is_shared = path is not None  # Other processes may have opened the file, too.
        self._computes = self._lock is None
        # Files that are still arriving. Each has its own descriptor.
        self.arriving_files = SharedLimit(MOST_ARRIVING)
        self.arriving_bytes = SharedLimit(limits.num_bytes)

    async def close(self) -> None:
        await super().close()
        if self._lock is not None:
            os.close(self._lock)

    def may_compute(self) -> bool:
        """Return whether this process computes batches. If several share a file, it is the one that holds the lock."""
        if not self._computes and self._lock is not None:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._computes = True
        return self._computes

    # -- room ---------------------------------------------------------------------------------------------------------

    def _check_room(self, owner: str, num_bytes: int, param: str = "file") -> None:
        """Raise InvalidRequest, about `param`, if there is no room for `num_bytes` more."""
        taken = self._taken()
        if not self._has_room(taken, owner, num_bytes):
            raise InvalidRequest(
                f"Files and batches may have {self._limits.num_bytes} bytes together (--response-store-bytes), in "
                f"shares by API key. Yours have {taken.get(owner, 0)} already, and this needs {num_bytes}. Delete some "
                "files, or send less.",
                param=param,
            )

    check_room = on_thread(_check_room)

    def _taken(self) -> dict[str, int]:
        return dict(self._all("SELECT owner, num_bytes FROM file_owners"))

    def _has_room(self, taken: dict[str, int], owner: str, num_bytes: int) -> bool:
        most = self._limits.num_bytes
        return sum(taken.values()) + num_bytes <= most or is_within_share(most, taken, owner, num_bytes)

    def _drop_old(self) -> None:
        execute = self._connection.execute
        oldest = self._oldest()
        execute(f"DELETE FROM stored_files WHERE created_at <= ? AND {_UNREAD}", (oldest,))
        has_files = "EXISTS (SELECT 1 FROM stored_files WHERE batch = stored_batches.id)"
        old = f"created_at <= ? AND NOT is_open AND NOT {has_files}"
        execute(f"DELETE FROM stored_lines WHERE batch IN (SELECT id FROM stored_batches WHERE {old})", (oldest,))
        execute(f"DELETE FROM stored_batches WHERE {old}", (oldest,))

    # -- files --------------------------------------------------------------------------------------------------------

    @contextmanager
    def new_content(self) -> Iterator[IO[bytes]]:
        """Open a buffer for content that arrives. Beyond PIECE_BYTES, it is a nameless file next to the database, which
        ends with the process. Raises Unavailable if it cannot be written, as on a full disk."""
        with reported():
            try:
                with tempfile.SpooledTemporaryFile(PIECE_BYTES, buffering=PIECE_BYTES, dir=self._folder) as content:
                    yield content
            except OSError as error:
                raise sqlite3.OperationalError(f"an upload cannot be written: {error.strerror}") from error

    @on_thread
    def files(
        self, owner: str, purpose: str | None, limit: int, after: str | None, before: str | None = None
    ) -> list[FileObject]:
        """Return an owner's files, newest first: those that follow the one with the id `after`, or that precede the one
        with the id `before`. Raises NotFound if there is none."""
        only = {} if purpose is None else {"purpose": purpose}
        return self._page(FileObject, "stored_files", owner, limit, after, before=before, only=only)

    def content(self, file: int) -> AsyncIterator[bytes]:
        """Return the content of the file with this number, in parts. It ends early if the file is deleted."""
        return _parts(partial(self._content, file))

    @on_thread
    def slice(self, file: int, start: int, num_bytes: int) -> bytes:
        """Return a part of an uploaded file, or b"" if it no longer exists."""
        first = start // PIECE_BYTES * PIECE_BYTES
        query = "SELECT content FROM file_pieces WHERE file = ? AND start >= ? AND start < ? ORDER BY start"
        rows = self._all(query, file, first, start + num_bytes)
        return b"".join(content for (content,) in rows)[start - first :][:num_bytes]

    @on_thread
    def file(self, owner: str, file_id: str) -> tuple[FileObject, int] | None:
        query = (
            "SELECT object, number FROM stored_files WHERE owner = ? AND id = ? AND created_at > ? AND NOT is_deleted"
        )
        for row, number in self._all(query, owner, file_id, self._oldest()):
            return msgspec.json.decode(row, type=FileObject), number
        return None

    @on_thread
    def add_file(self, owner: str, file: FileObject, content: IO[bytes]) -> None:
        """Store a file, unless a server that ended before it could answer has stored it. Raises InvalidRequest if there
        is no room."""
        with database.transaction(self._connection):
            if self._has("stored_files", owner, file.id):
                return
            self._drop_old()
            self._check_room(owner, self._file_bytes(file))
            self._insert_content(self._insert_file(owner, file, self._file_bytes(file)), content)

    def _insert_content(self, file: int, content: IO[bytes]) -> None:
        content.seek(0)
        start = 0
        while piece := content.read(PIECE_BYTES):
            self._connection.execute("INSERT INTO file_pieces VALUES (?, ?, ?)", (file, start, piece))
            start += PIECE_BYTES

    def _file_bytes(self, file: FileObject) -> int:
        return file.bytes + len(file.filename.encode()) + ROW_BYTES

    def _insert_file(
        self, owner: str, file: FileObject, num_bytes: int, batch: str | None = None, failed: bool | None = None
    ) -> int:
        number = self._connection.execute(
            "INSERT INTO stored_files (owner, id, created_at, purpose, num_bytes, object, batch, failed)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (owner, file.id, self._clock(), file.purpose, num_bytes, msgspec.json.encode(file), batch, failed),
        ).lastrowid
        assert number is not None
        return number

    @on_thread
    def delete_file(self, owner: str, file_id: str) -> bool:
        execute = self._connection.execute
        with database.transaction(self._connection):
            files = self._all(
                "SELECT number, batch, failed FROM stored_files WHERE owner = ? AND id = ? AND NOT is_deleted",
                *(owner, file_id),
            )
            for number, batch, failed in files:
                if batch is not None:
                    ((num_bytes,),) = self._all(
                        "SELECT coalesce(sum(length(result)), 0) FROM stored_lines WHERE batch = ? AND failed = ?",
                        *(batch, failed),
                    )
                    execute("DELETE FROM stored_lines WHERE batch = ? AND failed = ?", (batch, failed))
                    execute("UPDATE stored_batches SET num_bytes = num_bytes - ? WHERE id = ?", (num_bytes, batch))
                execute("UPDATE stored_files SET is_deleted = 1 WHERE number = ?", (number,))
            self._drop_deleted()
        self._empty_log()
        return bool(files)

    def _empty_log(self) -> None:
        """Empty the log next to the file, which would otherwise still have what was deleted."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _drop_deleted(self) -> None:
        self._connection.execute(f"DELETE FROM stored_files WHERE is_deleted AND {_UNREAD}")

    @on_thread
    def _content(self, file: int, after: int) -> tuple[bytes, int | None]:
        """Return a part of a file's content, and the value of `after` for the next one, or None."""
        owners = self._all("SELECT batch, failed FROM stored_files WHERE number = ?", file)
        if not owners:
            return b"", None
        if owners[0][0] is None:
            rows = self._all("SELECT content FROM file_pieces WHERE file = ? AND start = ?", file, after)
            if rows:
                return (rows[0][0], after + PIECE_BYTES)
            return (b"", None)
        query = "SELECT number, result FROM stored_lines WHERE batch = ? AND failed = ? AND number > ? ORDER BY number"
        number, results = self._results(query, *owners[0], after)
        return b"".join(results), number

    def _results(self, query: str, *values: object) -> tuple[int | None, list[bytes]]:
        """Return answers by a query for numbers and answers, up to PAGE_BYTES or a single one, and the last number."""
        results: list[bytes] = []
        number: int | None = None
        num_bytes = 0
        with closing(self._connection.execute(query, values)) as rows:
            for row in rows:
                number, result = row
                results.append(result)
                num_bytes += len(result)
                if num_bytes >= PAGE_BYTES:
                    break
        return number, results

    # -- batches ------------------------------------------------------------------------------------------------------

    @on_thread
    def batches(self, owner: str, limit: int, after: str | None) -> list[BatchObject]:
        """Return an owner's batches that follow the one with the id `after`, newest first. Raises NotFound if there is
        none."""
        return self._page(BatchObject, "stored_batches", owner, limit, after, only={_OF_MESSAGES: False})

    @on_thread
    def message_batches(self, owner: str, limit: int, after: str | None, before: str | None) -> list[BatchObject]:
        """Return an owner's batches of messages, newest first: those that follow the one with the id `after`, or that
        precede the one with the id `before`. Raises NotFound if there is none."""
        return self._page(BatchObject, "stored_batches", owner, limit, after, before=before, only={_OF_MESSAGES: True})

    def message_results(self, batch_id: str) -> AsyncIterator[bytes]:
        """Return the answers of a batch in the order of its requests, in parts."""
        return _parts(partial(self._message_results, batch_id))

    @on_thread
    def _message_results(self, batch_id: str, after: int) -> tuple[bytes, int | None]:
        """Return the answers after a line's number, and the value of `after` for the next ones, or None."""
        query = "SELECT number, result FROM stored_lines WHERE batch = ? AND number > ? ORDER BY number"
        number, results = self._results(query, batch_id, after)
        return b"".join(results), number

    @on_thread
    def delete_batch(self, owner: str, batch_id: str) -> bool:
        """Delete a batch with its answers, and return whether it was there and had ended."""
        with database.transaction(self._connection):
            query = "DELETE FROM stored_batches WHERE owner = ? AND id = ? AND NOT is_open"
            is_deleted = bool(self._connection.execute(query, (owner, batch_id)).rowcount)
            if is_deleted:
                self._connection.execute("DELETE FROM stored_lines WHERE batch = ?", (batch_id,))
        self._empty_log()
        return is_deleted

    @on_thread
    def next_lines(self, batch_id: str, after: int) -> list[Line]:
        """Return the next lines after a number that are not done."""
        return [Line(*row) for row in self._all(_NEXT_LINES, batch_id, after, PAGE_LINES)]

    @on_thread
    def done_lines(self, batch_id: str, after: int) -> tuple[bytes, int]:
        """Return answers in the order in which they came, after the first ones, and the number before the next page."""
        query = "SELECT done, result FROM stored_lines WHERE batch = ? AND done > ? ORDER BY done"
        number, results = self._results(query, batch_id, after)
        return b"".join(results), after if number is None else number

    async def put(self, owned: Owned, answered: Result) -> None:
        """Store the answer to a line, and count it in the batch. Once this returns, no crash loses it."""
        with reported():
            # A stored answer is kept, even if its batch is cancelled or the server ends.
            await asyncio.shield(self._commits.put((owned, answered)))

    @on_thread
    def batch(self, owner: str, batch_id: str) -> BatchObject | None:
        query = "SELECT object FROM stored_batches WHERE owner = ? AND id = ? AND (is_open OR created_at > ?)"
        for (row,) in self._all(query, owner, batch_id, self._oldest()):
            return msgspec.json.decode(row, type=BatchObject)
        return None

    @on_thread
    def open_batches(self) -> list[Owned]:
        """Return all batches that have not ended, oldest first."""
        rows = self._all("SELECT object, owner, file FROM stored_batches WHERE is_open ORDER BY number")
        return [Owned(msgspec.json.decode(row, type=BatchObject), owner, file) for row, owner, file in rows]

    @on_thread
    def add_batch(self, owned: Owned, lines: list[Line], content: IO[bytes] | None = None) -> None:
        """Store a batch with its lines, unless a server that ended before it could answer has stored it. Their text is
        in its file, or else `content`, which no list of files has. Raises InvalidRequest if there is no room,
        Overloaded if the owner has too many open batches, and NotFound if its file has been deleted."""
        batch, owner, file = owned
        row = msgspec.json.encode(batch)
        num_bytes = len(row) + ROW_BYTES + sum(LINE_BYTES + 2 * len(line.custom_id.encode()) for line in lines)
        with database.transaction(self._connection):
            if self._has("stored_batches", owner, batch.id):
                return
            self._drop_old()
            if lines:
                ((num_open,),) = self._all("SELECT count(*) FROM stored_batches WHERE owner = ? AND is_open", owner)
                if num_open >= MOST_OPEN_BATCHES:
                    raise Overloaded(
                        f"{num_open} of your batches are under way, at most {MOST_OPEN_BATCHES} may be. "
                        "Wait for one to end, or cancel some.",
                        retry_after_seconds=60,
                    )
            if content is not None:
                file = self._insert_hidden(owned, num_bytes, content)
            else:
                query = "SELECT 1 FROM stored_files WHERE number = ? AND NOT is_deleted"
                if lines and not self._all(query, file):
                    raise NotFound("The input file was deleted meanwhile.", param="input_file_id")
                self._check_room(owner, num_bytes, "input_file_id")
            self._connection.execute(
                "INSERT INTO stored_batches (owner, id, created_at, is_open, file, num_bytes, object)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (owner, batch.id, self._clock(), bool(lines), file, num_bytes, row),
            )
            self._connection.executemany(
                "INSERT INTO stored_lines (batch, number, custom_id, start, num_bytes) VALUES (?, ?, ?, ?, ?)",
                ((batch.id, *line[:4]) for line in lines),
            )

    def _insert_hidden(self, owned: Owned, num_bytes: int, content: IO[bytes]) -> int:
        """Store the requests of a batch, which itself takes `num_bytes`. They count as a deleted file, which goes when
        the batch has ended. Return its number. Raises InvalidRequest if there is no room."""
        size = content.seek(0, os.SEEK_END)
        self._check_room(owned.owner, num_bytes + size + ROW_BYTES, "requests")
        name = owned.batch.id
        file = FileObject(id=name, bytes=size, created_at=int(self._clock()), filename=name, purpose="batch")
        number = self._insert_file(owned.owner, file, size + ROW_BYTES)
        self._insert_content(number, content)
        self._connection.execute("UPDATE stored_files SET is_deleted = 1 WHERE number = ?", (number,))
        return number

    def _put_all(self, waiting: list[tuple[Owned, Result]]) -> None:
        batches = {owned.batch.id: owned.batch for owned, _ in waiting}
        try:
            with database.transaction(self._connection):
                taken = self._taken()
                for owned, answered in waiting:
                    result = answered
                    if not self._has_room(taken, owned.owner, len(answered.content)):
                        result = self._without_room(owned.batch, answered)
                    taken[owned.owner] = taken.get(owned.owner, 0) + len(result.content)
                    self._put(owned.batch, result)
                for batch in batches.values():
                    self._write(batch)
        except Exception:
            for batch in batches.values():
                self._read_counts(batch)
            raise

    def _without_room(self, batch: BatchObject, answered: Result) -> Result:
        """Return the error that replaces an answer. Room for it was counted when the batch was added."""
        query = "SELECT custom_id FROM stored_lines WHERE batch = ? AND number = ?"
        for (custom_id,) in self._all(query, batch.id, answered.number):
            return Result(answered.number, given_up(batch, answered.number, custom_id, *NO_ROOM), None)
        return answered  # The batch has ended, and its answers were deleted.

    def _read_counts(self, batch: BatchObject) -> bool:
        """Update a batch's counts from the store, and return whether it is still open."""
        rows = self._all("SELECT object, is_open FROM stored_batches WHERE id = ?", batch.id)
        if not rows:  # Another process has ended and deleted it.
            return False
        ((row, is_open),) = rows
        stored = msgspec.json.decode(row, type=BatchObject)
        batch.request_counts = stored.request_counts
        batch.usage = stored.usage
        return bool(is_open)

    def _put(self, batch: BatchObject, answered: Result) -> None:
        number, content, usage = answered
        counts = batch.request_counts
        whole = batch.usage
        marked = self._connection.execute(
            "UPDATE stored_lines SET result = ?, failed = ?, done = ?"
            " WHERE batch = ? AND number = ? AND result IS NULL",
            (content, usage is None, counts.completed + counts.failed + 1, batch.id, number),
        )
        if not marked.rowcount:
            return  # It has been given up.
        self._connection.execute(
            "UPDATE stored_batches SET num_bytes = num_bytes + ? WHERE id = ?", (len(content), batch.id)
        )
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
        # Another process may have ended it.
        query = "UPDATE stored_batches SET object = ? WHERE id = ? AND is_open"
        self._connection.execute(query, (msgspec.json.encode(batch), batch.id))

    @on_thread
    def end(self, owned: Owned, status: Status, code: str = "", message: str = "") -> bool:
        """End a batch, and give up its remaining lines with this error. Return False if it has ended before."""
        batch = owned.batch
        now = int(self._clock())
        with database.transaction(self._connection):
            if not self._read_counts(batch):
                return False
            number = 0
            num_failed = batch.request_counts.failed
            while lines := self._all(_NEXT_LINES, batch.id, number, PAGE_LINES):
                for number, custom_id, *_ in lines:
                    self._put(batch, Result(number, given_up(batch, number, custom_id, code, message), None))
            # These lines are in the file of errors, but only an expired batch of OpenAI's API counts them as failed.
            if status == "cancelled" or batch.is_of_messages:
                batch.request_counts.failed = num_failed
            if not batch.is_of_messages:
                self._insert_outputs(owned, now)
            batch.end(status, now)
            self._write(batch)
            self._connection.execute("UPDATE stored_batches SET is_open = 0 WHERE id = ?", (batch.id,))
            self._drop_deleted()
        return True

    def _insert_outputs(self, owned: Owned, now: int) -> None:
        """Make the files of a batch whose content is its answers and its errors, if it has any."""
        batch = owned.batch
        for failed, name in enumerate(("output_file_id", "error_file_id")):
            ((num_lines, num_bytes),) = self._all(
                "SELECT count(*), sum(length(result)) FROM stored_lines WHERE batch = ? AND failed = ?",
                *(batch.id, failed),
            )
            if num_lines:
                file_id = f"file-{self._runtime.token_hex(16)}"
                filename = f"{batch.id}_{name[:-8]}.jsonl"
                file = FileObject(
                    id=file_id, bytes=num_bytes, created_at=now, filename=filename, purpose="batch_output"
                )
                self._insert_file(owned.owner, file, ROW_BYTES, batch.id, bool(failed))
                setattr(batch, name, file_id)

    def _has(self, table: str, owner: str, name: str) -> bool:
        return bool(self._all(f"SELECT 1 FROM {table} WHERE owner = ? AND id = ?", owner, name))

    def _page(
        self,
        kind: type[T],
        table: str,
        owner: str,
        limit: int,
        after: str | None,
        *,
        before: str | None = None,
        only: Mapping[str, object],
    ) -> list[T]:
        """Return a page of the items with these values of expressions, newest first. Raises NotFound if there is no
        item `after` or `before`."""
        values: tuple[object, ...] = (owner, self._oldest())
        there = f"FROM {table} WHERE owner = ? AND "
        there += "(is_open OR created_at > ?)" if table == "stored_batches" else "created_at > ? AND NOT is_deleted"
        if (edge := after if before is None else before) is not None:
            places = self._all(f"SELECT number {there} AND id = ?", *values, edge)
            if not places:
                raise NotFound("There is no such item.")
            there = f"{there} AND number {'<' if before is None else '>'} ?"
            values = (*values, *places[0])
        there += "".join(f" AND ({expression}) = ?" for expression in only)
        values = (*values, *only.values())
        order = "DESC" if before is None else "ASC"
        rows = self._all(f"SELECT object {there} ORDER BY number {order} LIMIT ?", *values, limit)
        items = [msgspec.json.decode(row, type=kind) for (row,) in rows]
        return items if before is None else items[::-1]


async def _parts(read: Callable[[int], Awaitable[tuple[bytes, int | None]]]) -> AsyncIterator[bytes]:
    """Yield parts. `read` takes the place after which a part begins, and returns the part with the next such place, or
    None."""
    after: int | None = 0
    while after is not None:
        part, after = await read(after)
        if part:
            yield part
