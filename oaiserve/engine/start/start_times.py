"""Stamps the parts of a start, counted from the beginning of the process, for one line of the log.

Parts may overlap, since some run in threads. Stdlib only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class StartPart(NamedTuple):
    name: str
    begin_ns: int
    end_ns: int


class StartTimes:
    """The parts of one start. Any thread may stamp."""

    def __init__(self, began_ns: int | None = None) -> None:
        """Count from `began_ns`, by default from the start of this process."""
        self._began_ns = _process_began_ns() if began_ns is None else began_ns
        self._parts: list[StartPart] = []
        self._running: list[str] = []

    def since_begin(self, name: str) -> None:
        self._parts.append(StartPart(name, self._began_ns, monotonic_ns()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the `with` block, even if it raises."""
        begin_ns = monotonic_ns()
        self._running.append(name)
        try:
            yield
        finally:
            self._running.remove(name)
            self._parts.append(StartPart(name, begin_ns, monotonic_ns()))

    @property
    def current(self) -> str:
        """Return the part under way that began last, or "" if none is under way."""
        return next(reversed(self._running), "")

    def run(self, name: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        with self.part(name):
            return function(*arguments, **named)

    def __str__(self) -> str:
        """Return each part with its beginning and end, in milliseconds since the process began."""
        parts = sorted(self._parts, key=lambda part: part.begin_ns)
        return ", ".join(f"{part.name} {self._ms(part.begin_ns)} to {self._ms(part.end_ns)}" for part in parts)

    def _ms(self, stamp_ns: int) -> int:
        return round((stamp_ns - self._began_ns) / 1e6)


def _process_began_ns() -> int:
    """Return when this process began, as precisely as the system reports it (within 10 ms on Linux)."""
    now_ns = monotonic_ns()
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_seconds = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return now_ns - max(0, round((time.clock_gettime(time.CLOCK_BOOTTIME) - began_seconds) * 1e9))
    except (OSError, ValueError, IndexError, AttributeError):
        return now_ns
