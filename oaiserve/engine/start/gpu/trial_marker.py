"""The file that outlives a start which a trial on the GPU has ended. Stdlib only."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import FrameType

from oaiserve.files import private

log = logging.getLogger(__name__)

_ENDING = (signal.SIGINT, signal.SIGTERM)  # by which somebody else ends the process


def marker_path(*about: str) -> Path:
    """Return the file for a model and all else on which its trials depend."""
    return private.cache_folder() / "trials" / hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]


class TrialMarker:
    """Remembers the trial that is under way, and the trials in which earlier starts have ended, with their days."""

    def __init__(self, path: Path | None, *, forget: bool = False) -> None:
        """Read the file. Without a path, or where the file cannot be private, nothing is remembered."""
        self.died: dict[str, str] = {}
        self._path = path
        self._keeps = False
        if path is None:
            return
        try:
            private.make_folder(path.parent)
            private.verified(path.parent)
            trying = None if forget else self._read(path)
        except FileNotFoundError:
            return
        except (OSError, RecursionError, TypeError, ValueError, private.NotPrivate) as error:
            self._give_up(error)
            return
        if trying is not None:
            self.died[trying] = date.today().isoformat()
        self._write(None)

    def _read(self, path: Path) -> str | None:
        """Read the trials in which starts have ended, and return the one under way."""
        found = json.loads(private.read_file(path))
        if not isinstance(found, dict):
            raise TypeError(f"{path} has another form")
        trying = found.get("trying")
        died = found.get("died", {})
        if not isinstance(trying, str | None) or not isinstance(died, dict):
            raise TypeError(f"{path} has another form")
        self.died = {feature: str(day) for feature, day in died.items()}
        return trying

    def _give_up(self, error: Exception) -> None:
        log.warning("A trial on the GPU that ends the process would be tried again: %s", error)
        self._path = None

    @contextmanager
    def trying(self, feature: str) -> Iterator[None]:
        """Mark a trial in the block. The mark stays if the process ends there, unless a signal asked it to."""

        def end(number: int, frame: FrameType | None) -> None:
            self._write(None)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        is_main = threading.current_thread() is threading.main_thread()
        ending = [n for n in _ENDING if is_main and signal.getsignal(n) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, end) for number in ending}
        self._write(feature)
        try:
            yield
        finally:
            if not self._keeps:
                self._write(None)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def keep(self) -> bool:
        """Leave the mark of the trial under way, which has lost the GPU. Return whether a next start will find it."""
        self._keeps = True
        return self._path is not None

    def _write(self, trying: str | None) -> None:
        if self._path is None:
            return
        try:
            if trying is None and not self.died:
                self._path.unlink(missing_ok=True)
                return
            private.write_file(self._path, json.dumps({"trying": trying, "died": self.died}).encode())
        except OSError as error:
            self._give_up(error)
