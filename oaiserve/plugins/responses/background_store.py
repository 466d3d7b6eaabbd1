"""`BackgroundStore`: the responses in the background that are not complete, in the database of responses.

A response is stored with its request when it is accepted, so it survives the process that makes it: another one makes
it again from its beginning. One that is complete is in the store of responses instead; those that failed or were
cancelled stay here. The store knows nothing of HTTP.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from oaiserve.errors import InvalidRequest, Overloaded
from oaiserve.http.shared_limit import is_within_share
from oaiserve.plugins.responses.process_claim import NOBODY, ProcessClaim
from oaiserve.plugins.responses.store import StoredResponse
from oaiserve.plugins.shared import database
from oaiserve.plugins.shared.store import Store, on_thread
from oaiserve.plugins.shared.store_options import StoreLimits
from oaiserve.runtime import Runtime
from oaiserve.wire.continuation import StreamIds, ids_of

ROW_BYTES = 1024  # charged for a response in addition to its content

_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS background_responses (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    is_open INTEGER NOT NULL, -- 0: it has failed or was cancelled
    process TEXT NOT NULL, -- that makes it; empty: nobody does
    num_deaths INTEGER NOT NULL, -- processes that ended without notice while they made it
    changed_at REAL NOT NULL, -- when it was accepted, or ended
    expires_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL, -- that count for the limit of the store
    model TEXT NOT NULL,
    stream_ids TEXT NOT NULL, -- its id, time and seed, so that its bytes are the same when it is made again
    conversation_id TEXT NOT NULL,
    previous_id TEXT,
    response BLOB NOT NULL, -- its last known state
    input_items BLOB NOT NULL,
    body BLOB NOT NULL, -- of the request
    UNIQUE (owner, id)
)
""",
    "CREATE INDEX IF NOT EXISTS background_by_owner ON background_responses (owner, is_open, num_bytes)",
    "CREATE INDEX IF NOT EXISTS open_background ON background_responses (process, owner, id) WHERE is_open",
)
_STATE = "id, conversation_id, previous_id, response, input_items"
_OPEN = "owner = ? AND id = ? AND is_open"


class Job(NamedTuple):
    """The request for a response in the background."""

    owner: str
    model: str
    stream_ids: StreamIds
    expires_at: float  # Unix time after which no process begins it again
    body: bytes


class Abandoned(NamedTuple):
    """A response that no process makes any more."""

    owner: str
    id: str
    model: str
    stream_ids: StreamIds
    expires_at: float
    num_deaths: int  # processes that ended without notice while they made it
    num_bytes: int


class Acceptance(NamedTuple):
    """The outcome of the attempt to accept a response."""

    made: StoredResponse | None = None  # the response so far, if a running process is making it, or its final state
    is_new: bool = True  # False: an earlier process had accepted it


class BackgroundStore(Store):
    """Responses by owner, in the file of responses, or in memory without a path. No owner finds those of another.

    They may have as many bytes and be as many as stored responses, apart from these, in shares by owner. Unfinished
    ones beyond that are refused; failed and cancelled ones make room for others, the oldest of the owner with the most.
    """

    def __init__(self, path: Path | None, limits: StoreLimits, runtime: Runtime) -> None:
        """Open the file. Raises StartupError."""
        super().__init__(database.opened(path, _SCHEMA), "background-store", limits, runtime)
        self.is_shared = path is not None  # Other processes may have opened the file, too.
        self.claim = ProcessClaim(path)

    async def close(self) -> None:
        await super().close()
        self.claim.close()

    @on_thread
    def accept(self, job: Job, state: StoredResponse) -> Acceptance:
        """Store a response that this process makes from now on: a new one, or one that was abandoned.

        If it has ended, or a running process makes it, nothing changes. Raises Overloaded and InvalidRequest if there
        is no room.
        """
        execute = self._connection.execute
        with database.transaction(self._connection):
            rows = self._all(
                "SELECT number, is_open, process FROM background_responses WHERE owner = ? AND id = ?",
                *(job.owner, state.id),
            )
            for number, is_open, process in rows:
                if not is_open or self.claim.is_alive(process):
                    return Acceptance(self._get(job.owner, state.id), is_new=False)
                execute(
                    "UPDATE background_responses SET process = ?, response = ?, num_deaths = num_deaths + ?"
                    " WHERE number = ?",
                    (self.claim.name, state.response, process != NOBODY, number),
                )
                return Acceptance(is_new=False)
            num_bytes = state.num_bytes + len(job.body) + ROW_BYTES
            self._check_room(job.owner, num_bytes)
            now = self._clock()
            execute(
                "INSERT INTO background_responses (owner, is_open, process, num_deaths, changed_at, expires_at,"
                f" num_bytes, model, stream_ids, {_STATE}, body)"
                " VALUES (?, 1, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(job.owner, self.claim.name, now, job.expires_at, num_bytes, job.model, job.stream_ids.as_text),
                    *state,
                    job.body,
                ),
            )
            self._make_room()
        return Acceptance()

    def _check_room(self, owner: str, num_bytes: int) -> None:
        """Raise Overloaded if there is no room for a further open response, and InvalidRequest if there never is."""
        limits = self._limits
        if num_bytes > limits.num_bytes:
            raise InvalidRequest(
                f"A response in the background is stored with its request, which takes {num_bytes} bytes here. This "
                f"server stores at most {limits.num_bytes} (--response-store-bytes). Send less, or leave out "
                "'background'.",
                param="background",
            )
        rows = self._all("SELECT owner, count(*), sum(num_bytes) FROM background_responses WHERE is_open GROUP BY 1")
        counts = {one: number for one, number, _ in rows}
        sizes = {one: number for one, _, number in rows}
        for most, taken, more in ((limits.number, counts, 1), (limits.num_bytes, sizes, num_bytes)):
            if sum(taken.values()) + more > most and not is_within_share(most, taken, owner, more):
                raise Overloaded(
                    f"{counts.get(owner, 0)} of your responses in the background are unfinished, with "
                    f"{sizes.get(owner, 0)} bytes, and the store has no room for more (--response-store-number, "
                    "--response-store-bytes). Wait for some to end, or cancel some.",
                    retry_after_seconds=60,
                )

    def _make_room(self) -> None:
        """Drop responses that have ended until the rest is within the limits."""
        execute = self._connection.execute
        execute("DELETE FROM background_responses WHERE NOT is_open AND changed_at <= ?", (self._oldest(),))
        for total, limit in (("count(*)", self._limits.number), ("sum(num_bytes)", self._limits.num_bytes)):
            while (self._all(f"SELECT {total} FROM background_responses")[0][0] or 0) > limit:
                owners = self._all(
                    f"SELECT owner FROM background_responses WHERE NOT is_open GROUP BY 1 ORDER BY {total} DESC LIMIT 1"
                )
                if not owners:
                    return
                execute(
                    "DELETE FROM background_responses WHERE number = (SELECT number FROM background_responses"
                    " WHERE owner = ? AND NOT is_open ORDER BY changed_at, number LIMIT 1)",
                    owners[0],
                )

    @on_thread
    def update(self, owner: str, state: StoredResponse) -> None:
        """Store the new state of an open response that this process makes."""
        query = f"UPDATE background_responses SET response = ? WHERE {_OPEN} AND process = ?"
        self._connection.execute(query, (state.response, owner, state.id, self.claim.name))

    @on_thread
    def release(self, owner: str, response_id: str) -> None:
        """Abandon a response that this process has not completed, for the next process."""
        query = f"UPDATE background_responses SET process = ? WHERE {_OPEN} AND process = ?"
        self._connection.execute(query, (NOBODY, owner, response_id, self.claim.name))

    @on_thread
    def complete(self, owner: str, response_id: str) -> bool:
        """Remove a response that is stored elsewhere now. Return False if another process has ended it before."""
        query = f"DELETE FROM background_responses WHERE {_OPEN} AND process = ?"
        return self._connection.execute(query, (owner, response_id, self.claim.name)).rowcount > 0

    @on_thread
    def end(self, owner: str, response_id: str, response: bytes) -> None:
        """End a response as failed or cancelled, with this state, unless it has ended."""
        with database.transaction(self._connection):
            self._connection.execute(
                "UPDATE background_responses SET is_open = 0, process = ?, changed_at = ?, response = ?, body = x'',"
                f" num_bytes = length(input_items) + ? WHERE {_OPEN}",
                (NOBODY, self._clock(), response, len(response) + ROW_BYTES, owner, response_id),
            )
            self._make_room()

    @on_thread
    def delete(self, owner: str, response_id: str) -> None:
        query = "DELETE FROM background_responses WHERE owner = ? AND id = ?"
        self._connection.execute(query, (owner, response_id))
        # Otherwise the log next to the file would still have the response.
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        query = f"SELECT {_STATE} FROM background_responses WHERE owner = ? AND id = ? AND (is_open OR changed_at > ?)"
        for row in self._all(query, owner, response_id, self._oldest()):
            return StoredResponse(*row)
        return None

    get = on_thread(_get)

    @on_thread
    def is_open(self, owner: str, response_id: str) -> bool:
        return bool(self._all(f"SELECT 1 FROM background_responses WHERE {_OPEN}", owner, response_id))

    @on_thread
    def is_made_elsewhere(self, owner: str, response_id: str) -> bool:
        """Return whether another running process makes a response."""
        rows = self._all(f"SELECT process FROM background_responses WHERE {_OPEN}", owner, response_id)
        return any(name != self.claim.name and self.claim.is_alive(name) for (name,) in rows)

    @on_thread
    def own(self) -> set[tuple[str, str]]:
        """Return the owners and ids of the responses that this process makes."""
        query = "SELECT owner, id FROM background_responses WHERE is_open AND process = ?"
        return {(owner, name) for owner, name in self._all(query, self.claim.name)}

    @on_thread
    def abandoned(self) -> list[Abandoned]:
        """Return the open responses that no running process makes, oldest first."""
        processes = [name for (name,) in self._all("SELECT DISTINCT process FROM background_responses WHERE is_open")]
        dead = [name for name in processes if not self.claim.is_alive(name)]
        query = (
            "SELECT owner, id, model, stream_ids, expires_at, num_deaths + (process != ?), num_bytes"
            f" FROM background_responses WHERE is_open AND process IN ({', '.join('?' * len(dead))}) ORDER BY number"
        )
        found = []
        for owner, response_id, model, text, *numbers in self._all(query, NOBODY, *dead):
            ids = ids_of(text)
            assert ids is not None
            found.append(Abandoned(owner, response_id, model, ids, *numbers))
        return found

    @on_thread
    def body(self, owner: str, response_id: str) -> bytes | None:
        """Return the body of the request for an open response."""
        for (body,) in self._all(f"SELECT body FROM background_responses WHERE {_OPEN}", owner, response_id):
            return bytes(body)
        return None
