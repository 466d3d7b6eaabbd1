"""Show the progress of a run: one line that is rewritten on a terminal, or a line every ten seconds in a log."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from loadtest.drive import Progress

LOG_SECONDS = 10.0
TICK_SECONDS = 0.5


class ProgressLine:
    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = monotonic()

    def show(self, title: str, progress: Progress, total: int) -> None:
        text = f"{title}: {progress.num_sent} of {total} sent, {progress.num_sent - progress.num_ended} in flight"
        if progress.num_failed:
            text += f", {progress.num_failed} failed"
        self._write(f"{text}, {progress.num_events} events")

    @contextmanager
    def while_waiting(self, title: str, tick_seconds: float = TICK_SECONDS) -> Iterator[None]:
        """Show for how long the `with` block has been running, from another thread."""
        began = monotonic()
        has_ended = threading.Event()

        def tick() -> None:
            while not has_ended.wait(tick_seconds):
                self._write(f"{title}, {monotonic() - began:.0f} s")

        thread = threading.Thread(target=tick, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            self.clear()

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif monotonic() - self._last >= LOG_SECONDS:
            self._last = monotonic()
            print(text, file=sys.stderr, flush=True)
