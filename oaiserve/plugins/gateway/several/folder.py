"""`ModelsFolder`: the temporary folder of a server of several models, with its store.

It is private to this user. A killed server leaves its folder, which may contain prompts and answers, so the next server
removes it. The lock on a folder is released when its server ends, however that happens.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "oaiserve-models-"
LEAST_AGE_SECONDS = 10.0  # A younger folder may be one that its server has not locked yet.


class ModelsFolder:
    """A new folder, until `remove` or the end of this process."""

    def __init__(self) -> None:
        """Make the folder, and remove those of servers that were killed."""
        _remove_abandoned()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        self._folder.cleanup()
        os.close(self._lock)


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # It is another user's, or another server removes it.
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(folder)
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > LEAST_AGE_SECONDS:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(folder)
