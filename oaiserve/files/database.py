"""Opens the server's small SQLite database, which has stored responses and keys, and may be shared by processes."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

from oaiserve.errors import StartupError
from oaiserve.files.private import FILE_MODE

APPLICATION_ID = 0x0A15E7E5  # in the header of the file, so that no other program's database is taken for one of ours
BUSY_SECONDS = 10.0  # the longest wait for another process that writes


def opened(
    path: Path | None, schema: Sequence[str], synchronous: Literal["FULL", "NORMAL"] = "FULL"
) -> sqlite3.Connection:
    """Open the file, create it if it is missing, and what it lacks of the schema; without a path, in memory.

    With FULL, a commit is on the disk when it returns. With NORMAL, the last ones may be lost with the machine, but not
    with the process. Raises StartupError.
    """
    try:
        if path is not None:
            # SQLite would create it readable for others, and gives the files beside it the same mode. A file that is
            # there is not touched: to close it would end the locks of this process's other connections to it.
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        connection = sqlite3.connect(
            path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except OSError as error:
        raise StartupError(f"--response-store is '{path}', which cannot be opened: {error.strerror}.") from error
    except sqlite3.Error as error:
        raise _unusable(path, error) from error
    try:
        _keep_a_log(connection)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA secure_delete = ON")  # deleted data is gone from the file
        with transaction(connection), closing(connection.cursor()) as cursor:
            (tables,) = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            (application_id,) = cursor.execute("PRAGMA application_id").fetchone()
            if tables and application_id != APPLICATION_ID:
                raise StartupError(f"--response-store is '{path}', which is the database of another program.")
            for statement in (*schema, f"PRAGMA application_id = {APPLICATION_ID}"):
                cursor.execute(statement)  # `executescript` would end the transaction
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise _unusable(path, error) from error
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    with connection:  # commits, or rolls back
        yield


def _keep_a_log(connection: sqlite3.Connection) -> None:
    """Switch the file to a write-ahead log, which takes turns where several processes open a new file together.

    SQLite does not wait by itself here: the switch asks for more of a lock that is held, which could wait for ever.
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


def _unusable(path: Path | None, error: sqlite3.Error) -> StartupError:
    return StartupError(f"--response-store is '{path}', which SQLite cannot use: {error}.")
