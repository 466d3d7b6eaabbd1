"""A database that is damaged, or whose log is, says so when it is opened."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from oaiserve.errors import StartupError
from oaiserve.plugins.shared import database

SCHEMA = ("CREATE TABLE IF NOT EXISTS notes (number INTEGER PRIMARY KEY, text TEXT NOT NULL, size INTEGER NOT NULL)",)
HEADER_BYTES = 32
FRAME_BYTES = 24 + 4096


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Return a database of five notes, all of which are still in its log, as if its process had been killed."""
    path = tmp_path / "before" / "store"
    path.parent.mkdir()
    with closing(database.opened(path, SCHEMA)) as connection:
        for number in range(5):
            connection.execute("INSERT INTO notes VALUES (?, ?, ?)", (number, "note", 4))
        shutil.copytree(path.parent, tmp_path / "after")
    return tmp_path / "after" / "store"


def change(log: Path, at: int, data: bytes = b"damage") -> None:
    with log.open("r+b") as file:
        file.seek(at)
        file.write(data)


def opened(path: Path) -> list[int]:
    with closing(database.opened(path, SCHEMA)) as connection:
        return [number for (number,) in connection.execute("SELECT number FROM notes")]


def test_a_log_that_a_killed_process_left_is_read_without_a_word(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert opened(killed) == [0, 1, 2, 3, 4]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (0, "is damaged from the beginning, so nothing of it can be read"),
        (20, "is damaged from the beginning, so nothing of it can be read"),
        (-2 * FRAME_BYTES + 100, "pages in it can be read"),  # within a page
        (-2 * FRAME_BYTES + 8, "pages in it can be read"),  # within the salts of a frame
    ],
)
def test_changes_lost_from_a_damaged_log_are_reported(
    killed: Path, place: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = killed.with_name("store-wal")
    change(log, place % log.stat().st_size)
    assert len(opened(killed)) < 5
    (warning,) = caplog.messages
    assert says in warning
    assert str(log) in warning


@pytest.mark.parametrize("num_bytes", [100, FRAME_BYTES - 30])
def test_a_log_that_ends_within_a_change_is_reported(
    killed: Path, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    log = killed.with_name("store-wal")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - num_bytes)
    assert len(opened(killed)) == 4
    assert "ends within a change" in caplog.text


def test_pages_of_an_older_log_after_those_of_the_newest_are_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    with closing(database.opened(path, SCHEMA)) as connection:
        for number in range(5):
            connection.execute("INSERT INTO notes VALUES (?, ?, ?)", (number, "note", 4))
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        connection.execute("INSERT INTO notes VALUES (?, ?, ?)", (5, "note", 4))
        assert path.with_name("store-wal").stat().st_size > HEADER_BYTES + 5 * FRAME_BYTES
        shutil.copytree(tmp_path, tmp_path / "killed")
    assert opened(tmp_path / "killed" / "store") == [0, 1, 2, 3, 4, 5]
    assert caplog.messages == []


def test_a_log_that_another_connection_writes_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    with closing(database.opened(path, SCHEMA)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO notes VALUES (1, 'note', 4)")
        connection.execute("COMMIT")
        assert opened(path) == [1]
    assert caplog.messages == []


def test_a_text_in_place_of_a_number_is_found(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with closing(database.opened(path, SCHEMA)) as connection:
        connection.execute("INSERT INTO notes VALUES (1, 'note', 4)")
        database.check_pages(connection)
        connection.execute("""UPDATE notes SET size = '{"id":1}'""")
        with pytest.raises(
            sqlite3.DatabaseError, match="a value of size in its table notes is not of the type INTEGER"
        ):
            database.check_pages(connection)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StartupError, match="file is not a database"):
        database.opened(path, SCHEMA)
