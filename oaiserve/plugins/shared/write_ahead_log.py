"""Finds changes that SQLite silently drops from a damaged write-ahead log when it opens a database."""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct(">8I")  # magic, version, bytes of a page, number of checkpoints, two salts, two checksums
_FRAME = struct.Struct(">4I")  # page, pages of the database if it ends a change or else 0, two salts; checksums follow
_FRAME_HEADER_BYTES = 24
_MAGIC = (0x377F0682, 0x377F0683)  # The checksums are of little-endian or big-endian words.


class _Frames(NamedTuple):
    """The frames of a log as their headers describe them. Their checksums are not compared."""

    is_log: bool  # False if the header of the file is damaged. Then everything after it is lost.
    number: int
    last_commit: int  # number of frames up to the end of the last complete change


def damage(path: Path, connection: sqlite3.Connection) -> str | None:
    """Say which changes in the log of a database are lost, in a sentence without a full stop; None if none are.

    The connection must be new: SQLite reads the log with the first statement.
    """
    log = path.with_name(f"{path.name}-wal")
    frames = _read(log)
    if frames is None:
        return None
    if not frames.is_log:
        return f"its log, '{log}', is damaged from the beginning, so nothing of it can be read"
    # The numbers: whether another process is in the way, the frames that SQLite has found valid, and the frames copied.
    _, num_sound, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    if _read(log) != frames:  # another process writes to it
        return None
    if num_sound < frames.last_commit:
        return f"its log, '{log}', is damaged: only {num_sound} of {frames.last_commit} pages in it can be read"
    if num_sound < frames.number:
        return f"its log, '{log}', ends within a change, because a server was killed or the log was cut"
    return None


def _read(log: Path) -> _Frames | None:
    """Return the frames of a log, or None if it has none."""
    try:
        size = log.stat().st_size
        with log.open("rb") as file:
            header = file.read(_HEADER.size)
            if len(header) + _FRAME_HEADER_BYTES > size:
                return None
            magic, _, page_bytes, _, *salts, _, _ = _HEADER.unpack(header)
            if magic not in _MAGIC or _checksums(header[:24], magic) != _HEADER.unpack(header)[-2:]:
                return _Frames(False, 0, 0)
            number = last_commit = 0
            frame_bytes = _FRAME_HEADER_BYTES + page_bytes
            for at in range(1, 2 + (size - _HEADER.size - _FRAME_HEADER_BYTES) // frame_bytes):
                end = _HEADER.size + at * frame_bytes
                file.seek(end - frame_bytes)
                _, num_pages, *salts_of_frame = _FRAME.unpack(file.read(_FRAME.size))
                if salts_of_frame == salts:  # Those of an older log may follow.
                    number = at
                    if num_pages and end <= size:
                        last_commit = at
    except OSError:  # there is no log
        return None
    except struct.error:  # another process has just emptied it
        return None
    return _Frames(True, number, last_commit)


def _checksums(data: bytes, magic: int) -> tuple[int, int]:
    """Return the checksums of SQLite's format of a log."""
    first = second = 0
    for one, two in struct.iter_unpack("<2I" if magic == _MAGIC[0] else ">2I", data):
        first = (first + one + second) % 2**32
        second = (second + two + first) % 2**32
    return first, second
