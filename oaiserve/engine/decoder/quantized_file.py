"""Cached files with quantized weights, which one start writes and later starts map.

A file consists of the blocks of a model's matrices. Native code writes them directly into the mapped file, so they are
in memory only once, as pages that the system can write back. The file gets a name only when all of it is on the disk,
so an interrupted start leaves nothing behind. The matrices are sorted by name, so their offsets need not be stored.

The user limits the total size of the files. The least recently used ones are removed first.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oaiserve.engine.decoder.blocks import FORMATS, Blocks
from oaiserve.storage import private
from oaiserve.storage.private import NotPrivate, cache_folder

_ALIGNMENT = 64
LEFT_BYTES = 2**31  # space that must stay free on the disk


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identifies a file. The numbers change if anything is written to it."""

    name: str
    inode: int
    num_bytes: int
    written_ns: int


class _MappedFile:
    def __init__(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self._end = 0

    def blocks(self, kind: int, n: int, k: int) -> Blocks:
        """Return the next blocks, for a matrix [n, k] in a format. In a new file, they have no values yet."""
        offset = self._end
        num_bytes = _num_bytes(kind, n, k)
        self._end += _aligned(num_bytes)
        data = np.frombuffer(self._map, np.uint8, num_bytes, offset).reshape(n, -1)
        return Blocks(data, kind, np.arange(n), self._map, offset)


class QuantizedFile(_MappedFile):
    """An unfinished file, which has no name yet."""

    def __init__(self, num_bytes: int, most_bytes: int) -> None:
        """Reserve `num_bytes` of space, and remove other files until all together take at most `most_bytes`.

        Raises OSError if there is no space, and NotPrivate if others could write to the folder.
        """
        private.make_folder(_folder())
        folder = private.verified(_folder())
        _make_room(folder, num_bytes, most_bytes)
        if not hasattr(os, "O_TMPFILE"):
            raise OSError("this system has no files without a name")
        self._folder = folder
        self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, private.FILE_MODE)
        os.posix_fallocate(self._descriptor, 0, num_bytes)  # without it, writing to a full disk kills the process
        super().__init__(mmap.mmap(self._descriptor, num_bytes))

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def finish(self, name: str) -> FileIdentity:
        """Give the file its name when all of it is on the disk. Raises OSError."""
        self._map.flush()
        os.fsync(self._descriptor)
        status = os.fstat(self._descriptor)
        unfinished = f".{name}-{secrets.token_hex(4)}"  # Processes in different containers may have the same id.
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # With folder descriptors, os.link follows the symbolic link in /proc to the file.
            os.link(f"/proc/self/fd/{self._descriptor}", unfinished, src_dir_fd=folder, dst_dir_fd=folder)
            os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)
        return FileIdentity(name, status.st_ino, status.st_size, status.st_mtime_ns)


class FinishedFile(_MappedFile):
    """A file from an earlier start."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            super().__init__(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.num_bytes = len(self._map)


def file_bytes(matrices: Sequence[tuple[int, int, int]]) -> int:
    """Return the size of a file with the blocks of these matrices, each a format and [n, k]."""
    return sum(_aligned(_num_bytes(*matrix)) for matrix in matrices)


def find(identity: FileIdentity) -> Path | None:
    """Return the path of a file and mark it as used, or return None if it is missing or has changed.

    Raises OSError, and NotPrivate if others could write to the folder.
    """
    path = private.verified(_folder()) / identity.name
    try:
        status = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise NotPrivate(f"{path} is not a regular file of this user")
    if (status.st_ino, status.st_size, status.st_mtime_ns) != (identity.inode, identity.num_bytes, identity.written_ns):
        return None
    os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))  # most systems rarely update access times
    return path


def _folder() -> Path:
    return cache_folder() / "quantized"


def _num_bytes(kind: int, n: int, k: int) -> int:
    return n * (k // FORMATS[kind].weights) * FORMATS[kind].num_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _make_room(folder: Path, num_bytes: int, most_bytes: int) -> None:
    """Remove the least recently used files until there is space for `num_bytes`. Raises OSError."""
    if num_bytes > most_bytes:
        raise OSError(f"its {num_bytes} bytes are more than --quantized-cache allows ({most_bytes})")
    files = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # Another start may remove or rename the file meanwhile.
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                files.append((path, status))
    sizes = {path: status.st_size for path, status in sorted(files, key=lambda each: each[1].st_atime_ns)}
    removed = []
    num_freed = 0
    while sum(sizes.values()) + num_bytes > most_bytes:
        removed.append(next(iter(sizes)))
        num_freed += sizes.pop(removed[-1])
    free = shutil.disk_usage(folder).free + num_freed
    if free < num_bytes + LEFT_BYTES:
        numbers = [f"{size / 1e9:.1f} GB" for size in (free, num_bytes, LEFT_BYTES)]
        raise OSError("the disk has {} free; they take {}, and {} must stay free".format(*numbers))
    for path in removed:
        path.unlink(missing_ok=True)
