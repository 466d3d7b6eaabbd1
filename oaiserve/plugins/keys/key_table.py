"""`KeyTable` stores keys and their uses in the small database, which all processes share.

A minute is the last 60 seconds. Each second has a row. A day begins at midnight, UTC.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, NamedTuple

from oaiserve.errors import Forbidden, RateLimited, StartupError
from oaiserve.http.keys import NAME_RULE, ROLES, Key, KeyUse, is_name
from oaiserve.plugins.shared.database import opened, transaction, usable
from oaiserve.runtime import THREADS

SECOND = 1
MINUTE = 60
DAY = 86_400
MOST_INTEGER = 2**63 - 1  # maximum of a column
LEAST_SHARE = 0.001
MOST_SHARE = 1000.0
KEPT_PERIODS = 62  # number of seconds, and of days, whose rows are stored


class Limits(NamedTuple):
    """The limits of a key. Each name is a column of the table of keys, and a flag of `oaiserve keys`."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_per_day: int | None = None
    tokens_per_day: int | None = None
    cost_per_day: float | None = None


NO_LIMITS = Limits()
_SCHEMA = (
    f"""
CREATE TABLE IF NOT EXISTS keys (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    digest BLOB NOT NULL UNIQUE,
    created REAL NOT NULL,
    revoked REAL,
    role TEXT NOT NULL,
    priority INTEGER,
    models TEXT NOT NULL, -- a list in JSON
    {", ".join(f"{name} NUMERIC" for name in Limits._fields)}
)
""",
    "CREATE UNIQUE INDEX IF NOT EXISTS valid_keys ON keys (name) WHERE revoked IS NULL",
    # A table of its own, so that files without it are of the same version.
    "CREATE TABLE IF NOT EXISTS shares (key INTEGER PRIMARY KEY, share REAL NOT NULL)",
    """
CREATE TABLE IF NOT EXISTS uses (
    key INTEGER NOT NULL,
    period INTEGER NOT NULL,
    start INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    cost REAL NOT NULL,
    last REAL NOT NULL,
    PRIMARY KEY (key, period, start)
) WITHOUT ROWID
""",
)
_SET_SHARE = """
INSERT INTO shares SELECT number, ? FROM keys WHERE name = ? AND revoked IS NULL
ON CONFLICT DO UPDATE SET share = excluded.share
"""
_ADD_USE = """
INSERT INTO uses VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests,
    tokens = tokens + excluded.tokens,
    cost = cost + excluded.cost,
    last = max(last, excluded.last)
"""


@dataclass(frozen=True, slots=True)
class StoredKey(Key):
    """A key of the table."""

    number: int = 0  # row number; uses are counted by it
    limits: Limits = NO_LIMITS
    priority: int | None = None  # default priority of its requests, and the best one that they may ask for
    models: tuple[str, ...] = ()  # allowed models and adapters; if empty, all
    begin: Callable[[StoredKey], KeyUse] | None = field(default=None, repr=False, compare=False)  # makes a new KeyUse

    def check_model(self, *names: str) -> None:
        if self.models and not {*names} & {*self.models}:
            shown = ", ".join(map(repr, self.models))
            message = f"The key '{self.name}' may not use the model {names[0][:200]!r}. It may use {shown}."
            raise Forbidden(message, param="model", code="model_not_found")

    def priority_for(self, requested: int | None) -> int:
        if self.priority is None:
            return requested or 0
        return self.priority if requested is None else max(requested, self.priority)

    def new_use(self) -> KeyUse | None:
        return None if self.begin is None else self.begin(self)


class Left(NamedTuple):
    """The rest of one limit of a key. `free` has the Unix times at which used parts become free again."""

    unit: str
    per: str
    limit: float
    used: float
    free: list[tuple[float, float]]

    def back_at(self, wanted: float) -> float:
        used = accumulate(amount for _, amount in self.free)
        return next(
            at for (at, _), so_far in zip(self.free, used, strict=True) if self.used - so_far + wanted <= self.limit
        )


@dataclass(slots=True)
class Use:
    """The use of a key by one request: its reservation, if the key has limits, and their headers in its answer."""

    key: StoredKey
    admitted: float | None = None  # Unix time; None if it was refused and doesn't count
    requests: int = 0  # requests counted so far
    tokens: int = 0  # tokens counted so far
    left: dict[str, str] = field(default_factory=dict)  # headers that say what the key has left


class KeyTable:
    """The table of keys in a file. Only one thread at a time may call its methods."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = lambda: THREADS.unix_ns() / 1e9,
        default_share: float = 1.0,
    ) -> None:
        """Open the file, and create it if it is missing. Raises StartupError."""
        self._path = path
        self._default_share = default_share
        self._connection = opened(path, _SCHEMA, "NORMAL")
        self.clock = clock
        self.close = self._connection.close

    def transaction(self) -> AbstractContextManager[None]:
        return transaction(self._connection)

    # -- keys: each change adds 1 to the version of the file -----------------------------------------------------------

    def version(self) -> int:
        version: int = self._connection.execute("PRAGMA user_version").fetchone()[0]
        return version

    def valid(self, begin: Callable[[StoredKey], KeyUse] | None = None) -> dict[bytes, StoredKey]:
        """Return the valid keys by digest. `begin` makes their uses. Raises StartupError for an unreadable table."""
        columns = f"name, digest, role, number, share, priority, models, {', '.join(Limits._fields)}"
        query = f"SELECT {columns} FROM keys LEFT JOIN shares ON key = number WHERE revoked IS NULL"
        found = {}
        with usable(self._path):
            for name, digest, role, number, share, priority, models, *limits in self._connection.execute(query):
                names = (*json.loads(models),)
                found[digest] = StoredKey(
                    name,
                    digest,
                    ROLES[role],
                    share or self._default_share,
                    number=number,
                    limits=Limits(*limits),
                    priority=priority,
                    models=names,
                    begin=begin,
                )
        return found

    def listed(self) -> list[dict[str, Any]]:
        """Return all keys to show to people, with today's use. Raises StartupError if the table cannot be read."""
        query = f"""
            SELECT name, role, share, priority, models, {", ".join(Limits._fields)}, created, revoked,
                coalesce(requests, 0) AS requests_today, coalesce(tokens, 0) AS tokens_today,
                coalesce(cost, 0.0) AS cost_today,
                (SELECT max(last) FROM uses WHERE uses.key = number AND period = {DAY}) AS last_used
            FROM keys LEFT JOIN uses ON uses.key = number AND period = {DAY} AND start = ?
            LEFT JOIN shares ON shares.key = number
            ORDER BY revoked IS NOT NULL, name
        """
        with usable(self._path):
            cursor = self._connection.execute(query, (_start(self.clock(), DAY),))
            rows = [dict(zip((column[0] for column in cursor.description), row, strict=True)) for row in cursor]
            return [{**row, "models": json.loads(row["models"])} for row in rows]

    def add(self, name: str, values: Mapping[str, Any]) -> str:
        """Create a key with these values of its columns, and return it. The table stores only its digest. Raises
        StartupError."""
        if not is_name(name):
            raise StartupError(f"'{name}' cannot be the name of a key: {NAME_RULE}.")
        key = f"sk-{token_urlsafe(32)}"
        columns: dict[str, Any]
        columns = {"name": name, "digest": sha256(key.encode()).digest(), "created": self.clock(), "models": "[]"}
        columns |= {"role": "use"} | _checked(values)
        share = columns.pop("share", None)
        given = f"({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        try:
            self._change(f"INSERT INTO keys {given}", (*columns.values(),), name, share)
        except sqlite3.IntegrityError:
            raise StartupError(f"There is a key '{name}' already. Revoke it first, or take another name.") from None
        return key

    def change(self, name: str, values: Mapping[str, Any]) -> None:
        """Change values of a valid key. Raises StartupError."""
        columns = _checked(values)
        if not columns:
            raise StartupError(f"Nothing is given that shall change of the key '{name}'.")
        share = columns.pop("share", None)
        changes = ", ".join([*(f"{column} = ?" for column in columns), "name = name"])
        update = f"UPDATE keys SET {changes} WHERE name = ? AND revoked IS NULL"
        if not self._change(update, (*columns.values(), name), name, share):
            raise StartupError(f"There is no valid key '{name}'. 'oaiserve keys list' shows all.")

    def revoke(self, name: str) -> None:
        self.change(name, {"revoked": self.clock()})

    def _change(self, statement: str, values: tuple[Any, ...], name: str, share: float | None) -> int:
        try:
            with self.transaction():
                changed = self._connection.execute(statement, values).rowcount
                if share is not None:
                    self._connection.execute(_SET_SHARE, (float(share), name))
                self._connection.execute(f"PRAGMA user_version = {self.version() + 1}")
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise StartupError(f"The file of the keys cannot be changed: {error}.") from error
        return changed

    # -- uses: call them in a transaction ------------------------------------------------------------------------------

    def reserve(self, use: Use, tokens: int) -> None:
        """Count a request and its `tokens` in the limits of its key, and note both in `use`. Raises RateLimited if the
        key has too few left."""
        now = self.clock()
        wanted = {"requests": 1, "tokens": tokens}
        for left in reversed(all_left := self._left(use.key, now)):  # Limits of a day last longer.
            if left.used + wanted.get(left.unit, 0) > left.limit or left.used >= left.limit:
                use.left = _headers(all_left, now)
                raise _refusal(use.key, left, wanted.get(left.unit, 0), now)
        use.admitted = now
        use.requests = 1
        use.tokens = tokens
        self._add(use, 1, tokens, 0.0, now)
        use.left = _headers(self._left(use.key, now), now)

    def look(self, use: Use) -> None:
        """Store what a key has left in a use, as `reserve` does, without counting anything."""
        now = self.clock()
        use.left = _headers(self._left(use.key, now), now)

    def settle(self, use: Use, tokens: int, cost: float) -> None:
        """Count what a request has used instead of its reservation, and delete old rows of its key.

        Unused tokens of the reservation count from the time of admission, and tokens beyond it from now."""
        if use.admitted is not None:
            now = self.clock()
            more = tokens - use.tokens
            self._add(use, 1 - use.requests, more, cost, use.admitted if more < 0 else now)
            old = "DELETE FROM uses WHERE key = ? AND start < ? - ? * period"
            self._connection.execute(old, (use.key.number, now, KEPT_PERIODS))

    def _add(self, use: Use, requests: int, tokens: int, cost: float, second: float) -> None:
        """Add requests, tokens and cost to two rows of a key: its second, and the day of the admission."""
        for period, at in ((SECOND, second), (DAY, use.admitted or 0.0)):
            row = (use.key.number, period, _start(at, period), requests, tokens, cost, self.clock())
            self._connection.execute(_ADD_USE, row)

    def _left(self, key: StoredKey, now: float) -> list[Left]:
        query = """
            SELECT period, start, requests, tokens, cost FROM uses
            WHERE key = ? AND ((period = 1 AND start BETWEEN ? AND ?) OR (period = ? AND start = ?)) ORDER BY start
        """
        # A second counts until all of it is 60 seconds old. Rows more than 60 seconds ahead mean that the clock was set
        # back.
        seconds = int(now) - MINUTE, int(now) + MINUTE
        rows = self._connection.execute(query, (key.number, *seconds, DAY, _start(now, DAY))).fetchall()
        found = []
        for name, limit in zip(Limits._fields, key.limits, strict=True):
            unit, _, per = name.partition("_per_")
            if limit is None:
                continue
            period, back_after = (SECOND, MINUTE + SECOND) if per == "minute" else (DAY, DAY)
            column = ("requests", "tokens", "cost").index(unit) + 2
            free = [(row[1] + back_after, row[column]) for row in rows if row[0] == period and row[column]]
            found.append(Left(unit, per, limit, sum(amount for _, amount in free), free))
        return found


def check_share(flag: str, share: float) -> None:
    """Raise StartupError for a share that is not allowed."""
    if not LEAST_SHARE <= share <= MOST_SHARE:
        raise StartupError(f"{flag} is {share:g}, but must be between {LEAST_SHARE:g} and {MOST_SHARE:g}.")


def _start(at: float, period: int) -> int:
    return int(at) // period * period


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns for these values, in which 0 means no limit. Raises StartupError."""
    columns = {name: value for name, value in values.items() if value is not None}
    for name in columns.keys() & {*Limits._fields}:
        if not 0 <= columns[name] < math.inf:
            raise StartupError(f"--{name.replace('_', '-')} is {columns[name]}, but must be at least 0. 0: no limit.")
        columns[name] = columns[name] or None
    if "share" in columns:
        check_share("--share", columns["share"])
    for name, value in columns.items():
        if isinstance(value, int) and abs(value) > MOST_INTEGER:
            raise StartupError(
                f"--{name.replace('_', '-')} is {value}, but must be between -{MOST_INTEGER} and {MOST_INTEGER}."
            )
    if "models" in columns:
        columns["models"] = json.dumps([] if "*" in columns["models"] else columns["models"])
    return columns


def _refusal(key: StoredKey, left: Left, wanted: float, now: float) -> RateLimited:
    is_too_large = wanted > left.limit
    seconds = None if is_too_large else max(1, math.ceil(left.back_at(wanted) - now))
    text = (
        f"Rate limit of the key '{key.name}' reached for {left.unit} per {left.per}: limit {left.limit:g}, used "
        f"{left.used:g}, requested {wanted:g}. "
        + ("Ask for fewer tokens." if is_too_large else f"Please try again in {seconds} s.")
    )
    of_day = "insufficient_quota" if left.per == "day" and not is_too_large else None
    return RateLimited(text, of_day or left.unit, seconds, code=of_day)


def _headers(lefts: list[Left], now: float) -> dict[str, str]:
    """Return OpenAI's headers for requests and for tokens, each from the limit with the least left."""
    headers = {}
    for unit in ("requests", "tokens"):
        of_unit = [left for left in lefts if left.unit == unit]
        if of_unit:
            least = min(of_unit, key=lambda left: left.limit - left.used)
            seconds = math.ceil(max([0.0, *(at - now for at, _ in least.free)]))
            headers[f"x-ratelimit-limit-{unit}"] = f"{least.limit:.0f}"
            headers[f"x-ratelimit-remaining-{unit}"] = f"{max(0.0, least.limit - least.used):.0f}"
            headers[f"x-ratelimit-reset-{unit}"] = f"{seconds}s"
    return headers
