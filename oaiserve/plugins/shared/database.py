"""Opens the server's small SQLite database, which has stored responses and keys, and may be shared by processes."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

from oaiserve.errors import StartupError
from oaiserve.plugins.shared.write_ahead_log import damage
from oaiserve.storage.private import FILE_MODE

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x0A15E7E5  # stored in the file's header, to recognise our databases
BUSY_SECONDS = 10.0  # the longest wait for another process that writes


def opened(
    path: Path | None,
    schema: Sequence[str],
    synchronous: Literal["FULL", "NORMAL"] = "FULL",
    without_path: Literal[":memory:", ""] = ":memory:",
) -> sqlite3.Connection:
    """Open the file, and create it and the missing parts of the schema. Without a path, the database is in memory; for
    "", it is in a nameless temporary file, which ends with the process.

    With FULL, a commit is on the disk when it returns. With NORMAL, the last commits may be lost with the machine, but
    not with the process. Raises StartupError.
    """
    with usable(path):
        return _opened(path, schema, synchronous, without_path)


@contextmanager
def usable(path: Path | None) -> Iterator[None]:
    """Turn the errors of a file that is damaged, not a database, or of another version into StartupError."""
    try:
        yield
    except (sqlite3.Error, LookupError, TypeError, ValueError) as error:
        raise StartupError(
            f"--response-store is '{path}', which cannot be used: {error}. Move the file away to start with an empty "
            "one, or restore it from a backup."
        ) from error


def check_pages(connection: sqlite3.Connection) -> None:
    """Read all pages of a database. Raises sqlite3.Error if one is damaged, or if a value has another type than its
    column."""
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(" ".join(verdict.split()))
    for table, columns in _columns(connection).items():
        wrong = " ".join(
            f"WHEN typeof(\"{name}\") NOT IN ('{kind.lower()}', 'null') THEN '{name}'"
            for name, kind in columns.items()
            if kind in ("INTEGER", "REAL", "TEXT")
        )
        query = f'SELECT CASE {wrong} END AS wrong FROM "{table}" WHERE wrong IS NOT NULL LIMIT 1'
        if wrong and (row := connection.execute(query).fetchone()) is not None:
            raise sqlite3.DatabaseError(
                f"a value of {row[0]} in its table {table} is not of the type {columns[row[0]]}"
            )


def _opened(path: Path | None, schema: Sequence[str], synchronous: str, without_path: str) -> sqlite3.Connection:
    if path is not None and path.exists() and not path.is_file():
        raise StartupError(f"--response-store is '{path}', which is not a file.")
    try:
        if path is not None:
            # SQLite would create it readable for others, and gives its additional files the same mode. An existing file
            # is not touched: closing it would end the locks of this process's other connections to it.
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except OSError as error:
        raise StartupError(f"--response-store is '{path}', which cannot be opened: {error.strerror}.") from error
    connection = sqlite3.connect(
        path or without_path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        if path is not None and (lost := damage(path, connection)) is not None:
            logger.warning("--response-store is '%s': %s. What was stored last may be missing", path, lost)
        _keep_a_log(connection)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA secure_delete = ON")  # deleted data is gone from the file
        with transaction(connection), closing(connection.cursor()) as cursor:
            (tables,) = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            (application_id,) = cursor.execute("PRAGMA application_id").fetchone()
            if tables and application_id != APPLICATION_ID:
                raise StartupError(f"--response-store is '{path}', which is the database of another program.")
            for statement in (*schema, f"PRAGMA application_id = {APPLICATION_ID}"):
                cursor.execute(statement)  # `executescript` would end the transaction.
            with closing(sqlite3.connect(":memory:")) as plain:
                for statement in schema:
                    plain.execute(statement)
                wanted = _columns(plain)
                stored_columns = _columns(connection)
            for table, columns in wanted.items():
                if stored_columns[table].keys() != columns.keys():
                    raise StartupError(
                        f"--response-store is '{path}', which another version of oaiserve has made: the columns of its "
                        f"table '{table}' are others. Use that version, or another file."
                    )
    except BaseException:
        connection.close()
        raise
    return connection


def _columns(connection: sqlite3.Connection) -> dict[str, dict[str, str]]:
    """Return the types of the columns of each table, by their names."""
    columns: dict[str, dict[str, str]] = {}
    query = (
        "SELECT t.name, c.name, c.type FROM sqlite_schema AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table'"
    )
    for table, column, kind in connection.execute(query):
        columns.setdefault(table, {})[column] = kind
    return columns


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    with connection:  # This commits, or rolls back.
        yield


def _keep_a_log(connection: sqlite3.Connection) -> None:
    """Switch the file to a write-ahead log. If several processes open a new file together, they take turns.

    SQLite itself does not wait here: the switch upgrades a lock that is held, which could wait forever.
    """
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(0.01)
