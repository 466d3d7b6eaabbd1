"""Show the progress of a run: a bar that is redrawn on a terminal, or a line every ten seconds in a log."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from loadtest.drive import Progress
from oaiserve.facts.times import duration

LOG_SECONDS = 10.0
TICK_SECONDS = 0.5
BAR_CHARACTERS = 12


def bar(share: float) -> str:
    full = round(min(1.0, share) * BAR_CHARACTERS)
    return "[" + "#" * full + "." * (BAR_CHARACTERS - full) + "]"


class ProgressLine:
    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = monotonic()
        self._title = ""
        self._began = 0.0

    def show(self, title: str, progress: Progress, total: int) -> None:
        """Show the progress of the run with this title."""
        if title != self._title:
            self._title = title
            self._began = monotonic()
        text = f"{progress.num_ended}/{total}, {progress.num_sent - progress.num_ended} in flight"
        if progress.num_missed > progress.num_failed:
            text += f", {progress.num_missed - progress.num_failed} missed"
        if progress.num_failed:
            text += f", {progress.num_failed} failed"
        if 0 < progress.num_ended < total:
            left = (monotonic() - self._began) * (total / progress.num_ended - 1)
            text += f", {duration(max(1, round(left)) * 1e9)} left"
        share = progress.num_ended / max(1, total)
        self._write(f"{title} {bar(share)} {text}" if self._is_terminal else f"{title}: {text}")

    @contextmanager
    def while_waiting(self, title: str, tick_seconds: float = TICK_SECONDS) -> Iterator[None]:
        """Show, from another thread, for how long the `with` block has been running."""
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
            width = shutil.get_terminal_size().columns - 1  # A longer line would wrap, and could not be overwritten.
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
        elif monotonic() - self._last >= LOG_SECONDS:
            self._last = monotonic()
            print(text, file=sys.stderr, flush=True)
