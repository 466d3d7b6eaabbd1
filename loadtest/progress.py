"""Show the progress of a run: one line that is rewritten on a terminal, or a line every ten seconds in a log."""

from __future__ import annotations

import sys
from time import monotonic

from loadtest.drive import Progress

LOG_SECONDS = 10.0


class ProgressLine:
    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = monotonic()
        self._title = ""

    def show(self, title: str, progress: Progress, total: int) -> None:
        if not self._is_terminal and monotonic() - self._last < LOG_SECONDS:
            return
        self._last = monotonic()
        text = f"{title}: {progress.num_sent} of {total} sent, {progress.num_sent - progress.num_ended} in flight"
        if progress.num_failed:
            text += f", {progress.num_failed} failed"
        text += f", {progress.num_events} events"
        print(f"\r\x1b[K{text}" if self._is_terminal else text, end="" if self._is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
