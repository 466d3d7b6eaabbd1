"""`ProcessClaim`: how processes that share a database find out whose work was abandoned. Stdlib only.

Each process has a small file next to the database and holds a lock on it, which the system releases when the process
ends, however that happens. So work that names a process without a locked file was abandoned.
"""

from __future__ import annotations

import fcntl
import glob
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile

from oaiserve.errors import StartupError

NOBODY = ""  # the name instead of a process


class ProcessClaim:
    """The name of this process in a shared database. Without a path, no other process can see the database."""

    def __init__(self, path: Path | None) -> None:
        """Create the file of this process. Raises StartupError."""
        self.name = token_hex(8)
        self._path = path
        self._descriptor: int | None = None
        if path is not None:
            try:
                self._create(path)
            except OSError as error:
                raise StartupError(
                    f"A file next to --response-store, which is '{path}', cannot be created: {error.strerror}."
                ) from error

    def _create(self, path: Path) -> None:
        self._remove_abandoned(path)
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.replace(file.name, self._file_of(self.name))  # Others see it from now on, with its lock.
            self._descriptor = os.dup(file.fileno())  # It keeps the lock.

    def is_alive(self, name: str) -> bool:
        """Return whether the process with this name has not ended."""
        if self._path is None or name in (NOBODY, self.name):
            return name == self.name
        return _is_locked(self._file_of(name))

    def close(self) -> None:
        """Give up the claim: the work that names this process is abandoned."""
        if self._descriptor is not None:
            self._file_of(self.name).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _file_of(self, name: str) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}-process-{name}")

    def _remove_abandoned(self, path: Path) -> None:
        """Remove the files of processes that were killed."""
        for file in path.parent.glob(f"{glob.escape(path.name)}-process-*"):
            if not _is_locked(file):
                file.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False
