"""Records the connections of stores, through which a test fills the disk or watches statements."""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
