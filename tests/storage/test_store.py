"""A store works on a thread of its own, which it has from the beginning."""

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from oaiserve.storage.store import Store
from oaiserve.storage.store_options import StoreLimits


def test_a_store_needs_no_more_threads_to_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = sqlite3.connect(tmp_path / "store", check_same_thread=False)
    store = Store(connection, "notes", StoreLimits(1, 1, 1.0))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(store.close())
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")
