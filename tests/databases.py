"""Records the connections of stores, through which a test fills the disk, watches statements or holds up a thread."""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest


@contextmanager
def opened_databases() -> Iterator[dict[str, list[sqlite3.Connection]]]:
    """Give the connections that the block opens by their paths."""
    connections: dict[str, list[sqlite3.Connection]] = defaultdict(list)
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def recorded(path: object, **options: Any) -> sqlite3.Connection:
        connection = connect(path, **options)
        connections[str(path)].append(connection)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", recorded)
        yield connections


@contextmanager
def held_up(connection: sqlite3.Connection) -> Iterator[Event]:
    """Hold up each statement of a connection until the block ends, and return the event that one is held up."""
    is_held = Event()
    may_go_on = Event()

    def wait() -> bool:
        is_held.set()
        return not may_go_on.wait(60)

    connection.set_progress_handler(wait, 1)
    try:
        yield is_held
    finally:
        may_go_on.set()
