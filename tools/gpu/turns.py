"""Lets sections that run side by side use one device: they start models together, and measure one at a time.

Locks on files tell processes about each other, and end with them.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

POLL_SECONDS = 0.01
# A section that measures waits for others that start models, for this time in all. Then it goes on beside them.
PATIENCE_SECONDS = 45.0


class Turns:
    """The turns of one section, which is at `place` in the list of sections: of those that wait, the first goes on."""

    def __init__(self, folder: Path, place: int) -> None:
        self._folder = folder
        self._place = place
        self._has_turn = False
        self._is_starting = False
        self._patience_seconds = PATIENCE_SECONDS

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Wait until no other section measures or starts a model, and keep others from it in the block."""
        if self._has_turn:
            yield
            return
        with ExitStack() as held:
            with self._locked(f"waits-{self._place:02}"):
                while not (not self._earlier_waits() and self._tried(held, "measures", fcntl.LOCK_EX)):
                    time.sleep(POLL_SECONDS)
            began = time.monotonic()
            while not self._is_starting and not self._tried(held, "starts", fcntl.LOCK_EX):
                if time.monotonic() - began > self._patience_seconds:
                    log.warning("Another section starts a model while this one measures")
                    break
                time.sleep(POLL_SECONDS)
            self._patience_seconds -= time.monotonic() - began
            self._has_turn = True
            try:
                yield
            finally:
                self._has_turn = False

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wait until no other section measures, and let others only start models in the block."""
        if self._has_turn or self._is_starting:
            yield
            return
        with ExitStack() as held:
            while not self._tried(held, "starts", fcntl.LOCK_SH):
                time.sleep(POLL_SECONDS)
            self._is_starting = True
            try:
                yield
            finally:
                self._is_starting = False

    def _earlier_waits(self) -> bool:
        for path in self._folder.glob("waits-*"):
            if int(path.name.removeprefix("waits-")) < self._place:
                with ExitStack() as tried:
                    if not self._tried(tried, path.name, fcntl.LOCK_SH):
                        return True
        return False

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._folder / name).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _tried(self, held: ExitStack, name: str, kind: int) -> bool:
        """Take a lock if it is free, until `held` is closed."""
        file = (self._folder / name).open("a")
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        held.enter_context(file)
        return True
