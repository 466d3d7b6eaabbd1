"""The store of the answers of /v1/responses, for clients to read, delete and continue: `ResponseDatabase`, in SQLite.

It is in memory, or in a file, which survives a restart and may be shared. It knows bytes and ids, and nothing of HTTP
or of the content of a response.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from oaiserve.plugins.shared import database
from oaiserve.plugins.shared.group_commit import GroupCommit
from oaiserve.plugins.shared.store import Store, on_thread, reported
from oaiserve.plugins.shared.store_options import StoreLimits
from oaiserve.runtime import Runtime

T = TypeVar("T")

# Why a store drops a response: it is too old, its space is needed for others, or it is larger than the whole store.
DROP_REASONS = ("age", "room", "size")


class StoredResponse(NamedTuple):
    """One answer with its input: one turn of a conversation. Conversations of /v1/conversations are stored in this
    form, too."""

    id: str
    conversation_id: str  # id of the conversation's first response
    previous_id: str | None  # the response that it continues
    response: bytes  # the response as JSON
    input_items: bytes  # items of this turn only, as JSON

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items)


CONVERSATION = "conv_"  # prefix of the ids of conversations


def is_conversation(stored_id: str) -> bool:
    return stored_id.startswith(CONVERSATION)


class StoreCounts(NamedTuple):
    """The numbers of a store: its responses and bytes, and the responses dropped since it was opened.

    If several stores share a file, the responses and bytes are those of all, as of the last time this one stored,
    deleted or counted. Dropped responses are those of this store.
    """

    number: int = 0
    num_bytes: int = 0
    dropped: Mapping[str, int] = MappingProxyType(dict.fromkeys(DROP_REASONS, 0))


class ConversationTooLarge(Exception):
    """A conversation has more bytes than the caller can take, or than the store may have."""


# The triggers maintain the totals, which would otherwise be counted for each response.
_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    previous_id TEXT,
    used INTEGER NOT NULL, -- counts the responses and what they go on from, because two may have the same time
    used_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    response BLOB NOT NULL,
    input_items BLOB NOT NULL,
    UNIQUE (owner, id)
)
""",
    "CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, used)",
    "CREATE INDEX IF NOT EXISTS by_use ON responses (used)",
    "CREATE INDEX IF NOT EXISTS by_time ON responses (used_at)",
    "CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, number INTEGER NOT NULL, num_bytes INTEGER NOT NULL)",
    """
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO owners VALUES (new.owner, 1, new.num_bytes)
        ON CONFLICT DO UPDATE SET number = number + 1, num_bytes = num_bytes + new.num_bytes;
END
""",
    """
CREATE TRIGGER IF NOT EXISTS dropped AFTER DELETE ON responses BEGIN
    UPDATE owners SET number = number - 1, num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
    DELETE FROM owners WHERE owner = old.owner AND number = 0;
END
""",
)
ANSWER_BYTES = 2**16  # bytes of a long answer
_COLUMNS = "id, conversation_id, previous_id, response, input_items"


class ResponseDatabase(Store):
    """A store of responses by owner, in a file, or in memory without a path. No owner finds those of another.

    If there are more responses or bytes than allowed, the owner with the most loses the oldest one. The age of a
    response is that of the last turn of its conversations. A response that is too large by itself is not stored.
    """

    def __init__(self, path: Path | None, limits: StoreLimits, runtime: Runtime) -> None:
        """Open the file, and create it if it is missing. Raises StartupError."""
        super().__init__(database.opened(path, _SCHEMA), "response-store", limits, runtime)
        self._commits = GroupCommit(self._thread, self._put_all)
        self._dropped = dict.fromkeys(DROP_REASONS, 0)
        with database.usable(path):
            self._counts = self._count()  # The thread replaces the whole value, and any thread may read it.

    async def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response, which replaces one with the same id. In a file, it survives a crash after this call.

        Another server may have stored the response, and ended before its client had all of it. The client gets the end
        of the answer from the server that stores it last, so it must find that version. Raises ConversationTooLarge for
        a conversation that could never be stored.
        """
        if is_conversation(stored.id):
            self._check_size(stored)
        await self._commits.put((owner, stored))

    @on_thread
    def check_room(self, owner: str, stored: StoredResponse) -> None:
        """Raise StoreFailed if a response with this input could not be stored now, as on a full disk. It stores zeros,
        and deletes them."""
        zeros = stored._replace(response=bytes(ANSWER_BYTES), input_items=bytes(len(stored.input_items)))
        with database.transaction(self._connection):
            self._insert(owner, zeros)
        with database.transaction(self._connection):
            self._connection.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, stored.id))

    def counts(self) -> StoreCounts:
        """Return the numbers of the store. Any thread may call this, and it does not wait."""
        return self._counts

    def recounted(self) -> StoreCounts:
        """Count what is stored now, and return the numbers. This waits for the store's thread."""

        def recount() -> None:
            self._counts = self._count()

        self._thread.submit(recount).result()
        return self._counts

    def _put_all(self, waiting: list[tuple[str, StoredResponse]]) -> None:
        with reported(), database.transaction(self._connection):
            too_old = self._connection.execute("DELETE FROM responses WHERE used_at <= ?", (self._oldest(),))
            too_large = sum(not self._insert(owner, stored) for owner, stored in waiting)
            in_the_way = self._make_room()
        for reason, number in zip(DROP_REASONS, (too_old.rowcount, in_the_way, too_large), strict=True):
            self._dropped[reason] += number
        self._counts = self._count()

    def _insert(self, owner: str, stored: StoredResponse) -> bool:
        """Store a response, and return whether it fits at all: a larger one would only evict others."""
        if stored.num_bytes > self._limits.num_bytes:
            return False
        now = self._clock()
        execute = self._connection.execute
        (used,) = self._one("SELECT coalesce(max(used), 0) + 1 FROM responses")
        if stored.previous_id is not None:
            execute(
                """
                WITH RECURSIVE conversation (id) AS (
                    SELECT ? UNION SELECT previous_id FROM responses JOIN conversation USING (id) WHERE owner = ?
                )
                UPDATE responses SET used = ?, used_at = ? WHERE owner = ? AND id IN conversation
                """,
                (stored.previous_id, owner, used, now, owner),
            )
        execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, stored.id))
        execute(
            f"INSERT INTO responses (owner, used, used_at, num_bytes, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (owner, used, now, stored.num_bytes, *stored),
        )
        return True

    @on_thread
    def replace(self, owner: str, old: StoredResponse, new: StoredResponse) -> bool:
        """Replace `old` by `new`, and return whether `old` was still stored unchanged. Raises ConversationTooLarge if
        `new` could never be stored."""
        self._check_size(new)
        with database.transaction(self._connection):
            num_replaced = self._connection.execute(
                "DELETE FROM responses WHERE owner = ? AND id = ? AND response = ? AND input_items = ? AND used_at > ?",
                (owner, old.id, old.response, old.input_items, self._oldest()),
            ).rowcount
            if num_replaced:
                self._insert(owner, new)
            in_the_way = self._make_room()
        self._dropped["room"] += in_the_way
        self._counts = self._count()
        if new.num_bytes < old.num_bytes:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # see `delete`
        return num_replaced > 0

    def _check_size(self, stored: StoredResponse) -> None:
        if stored.num_bytes > self._limits.num_bytes:
            raise ConversationTooLarge

    def _make_room(self) -> int:
        """Drop responses until the rest is within the limits, and return the number dropped."""
        dropped = 0
        for column, limit in (("number", self._limits.number), ("num_bytes", self._limits.num_bytes)):
            while (self._one(f"SELECT sum({column}) FROM owners")[0] or 0) > limit:
                (owner,) = self._one(f"SELECT owner FROM owners ORDER BY {column} DESC, owner DESC")
                (number,) = self._one("SELECT number FROM responses WHERE owner = ? ORDER BY used, number", owner)
                self._connection.execute("DELETE FROM responses WHERE number = ?", (number,))
                dropped += 1
        return dropped

    def _count(self) -> StoreCounts:
        number, num_bytes = self._one("SELECT coalesce(sum(number), 0), coalesce(sum(num_bytes), 0) FROM owners")
        return StoreCounts(number, num_bytes, self._dropped.copy())

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        row = self._connection.execute(
            f"SELECT {_COLUMNS} FROM responses WHERE owner = ? AND id = ? AND used_at > ?",
            (owner, response_id, self._oldest()),
        ).fetchone()
        if row is None:
            return None
        return StoredResponse(*row)

    get = on_thread(_get)

    @on_thread
    def conversation(self, owner: str, response_id: str, most_bytes: int) -> list[StoredResponse]:
        """Return the turns of a conversation up to this response, in order; none if one of them is missing. Raises
        ConversationTooLarge."""
        turns: list[StoredResponse] = []
        next_id: str | None = response_id
        too_large = False
        with database.transaction(self._connection, "DEFERRED"):  # All numbers are from the same moment.
            while next_id is not None:
                stored = self._get(owner, next_id)
                if stored is None:
                    return []
                most_bytes -= stored.num_bytes
                too_large = too_large or most_bytes < 0
                if not too_large:
                    turns.append(stored)
                next_id = stored.previous_id
        if too_large:
            raise ConversationTooLarge
        return turns[::-1]

    @on_thread
    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response, and return whether it existed."""
        with database.transaction(self._connection):
            deleted = self._connection.execute(
                "DELETE FROM responses WHERE owner = ? AND id = ? AND used_at > ?", (owner, response_id, self._oldest())
            )
        self._counts = self._count()
        # Otherwise the log next to the file would still have the response.
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return deleted.rowcount > 0

    def _one(self, query: str, *values: object) -> tuple[Any, ...]:
        (row,) = self._all(f"{query} LIMIT 1", *values)
        return row


class StoredDecoder(Generic[T]):
    """Decodes stored content. Raises StoreFailed if it is damaged."""

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def decode(self, content: bytes) -> T:
        with reported():
            return self._decode(content)


def check(path: Path) -> None:
    """Raise StartupError if the file cannot be used. A missing file is created."""
    with closing(database.opened(path, _SCHEMA)) as connection, database.usable(path):
        database.check_pages(connection)
