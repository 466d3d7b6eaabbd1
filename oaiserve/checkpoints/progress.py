"""Shows the progress of anything that takes over two seconds: the completed part, the total, and the remaining time.

A terminal shows a bar, which vanishes at the end. A log of complete lines gets a line every five seconds, and one at
the end; any other output shows nothing. The bars are tqdm's, since the hub's client and transformers count with tqdm.
If the level of this module's logger is above INFO, nothing is shown; lines need a level of at most INFO.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from threading import Event, Lock, Thread
from typing import Any, ClassVar, Self

from tqdm import tqdm

log = logging.getLogger(__name__)

SILENT_SECONDS = 2.0
LINE_SECONDS = 5.0  # seconds between two lines of a log
DRAW_SECONDS = 0.1  # seconds between two drawings of a bar
LOOK_SECONDS = 0.5  # seconds between two checks of long-running work
MOST_LINE_SECONDS = 60.0  # the most seconds between two lines about long-running work


class Progress(tqdm):  # type: ignore[misc]
    """A progress bar, which libraries may use instead of tqdm's."""

    monitor_interval = 0  # 0 keeps tqdm from starting its monitor thread.
    last_print_t: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._is_terminal = sys.stderr.isatty()
        self.is_shown = False
        is_hidden = log.level > logging.INFO or (log.level == logging.NOTSET and not self._is_terminal)
        between_seconds = DRAW_SECONDS if self._is_terminal else LINE_SECONDS
        ours: dict[str, Any] = {"delay": SILENT_SECONDS, "mininterval": between_seconds, "miniters": 1, "leave": False}
        ours |= {"dynamic_ncols": self._is_terminal, "file": sys.stderr, "disable": is_hidden}
        super().__init__(*arguments, **named | ours)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or `msg` in its place, and return whether the cursor is after it."""
        # tqdm draws a bar when it is made, and again after a line of the log, even before its delay has passed.
        if msg is None and (not hasattr(self, "start_t") or self._time() < self.start_t + self.delay):
            return False
        if self._is_terminal:
            self.is_shown = True
            return bool(super().display(msg, pos))
        if msg is None and self.n:  # tqdm passes "" to clear a line
            self.is_shown = True
            print(self, file=sys.stderr, flush=True)
        return False

    def clear(self, nolock: bool = False) -> None:
        if self._is_terminal and self.is_shown:
            super().clear(nolock)

    def close(self) -> None:
        if self.is_shown and not self.disable:
            self.is_shown = False
            if not self._is_terminal and self.n != self.last_print_n:
                print(self, file=sys.stderr, flush=True)
            # Otherwise tqdm leaves a bar on the screen that was drawn after a line of the log.
            self.last_print_t = max(self.last_print_t, self.start_t + self.delay)
        super().close()


class Elapsed:
    """A line with the elapsed time of work of unknown length. If several exist at once, only the first is shown."""

    _is_shown: ClassVar[Lock] = Lock()

    def __init__(self, doing: str) -> None:
        self._bar: Progress | None = None
        if self._is_shown.acquire(blocking=False):
            self._bar = Progress(desc=doing, bar_format="{desc} ... {elapsed}")

    @property
    def is_first(self) -> bool:
        return self._bar is not None

    def show(self) -> None:
        if self._bar is not None:
            self._bar.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._is_shown.release()


class Doing:
    """Shows which part of long-running work is in progress: as a bar on a terminal, else as lines at growing intervals,
    the first after SILENT_SECONDS. Shows nothing while another bar is visible."""

    def __init__(
        self,
        what: str,
        part: Callable[[], str],
        say: Callable[[str], object],
        *,
        has_bar: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`part` returns the name of the current part, and `say` writes a line. Without `has_bar`, a terminal gets
        lines, too, as is right if several processes write to it."""
        self._what = what
        self._part = part
        self._say = say
        self._clock = clock
        self._began = clock()
        self._due = SILENT_SECONDS  # seconds from the start to the next line
        self._bar: Progress | None = None
        if has_bar and sys.stderr.isatty():
            bar = Progress(desc=what, bar_format="{desc} ... {elapsed}")
            self._bar = None if bar.disable else bar
        self._has_ended = Event()
        self._thread = Thread(target=self._look_often, name="doing", daemon=True)

    def look(self) -> None:
        """Draw the bar, or write a line if it is due."""
        with Progress.get_lock():
            # tqdm's own bars lack this attribute, and so do bars under construction.
            others = [bar for bar in Progress._instances if bar is not self._bar and getattr(bar, "is_shown", False)]
        part = self._part()
        doing = f"{self._what}: {part}" if part else self._what
        seconds = self._clock() - self._began
        if self._bar is not None and others:
            self._bar.clear()
        elif self._bar is not None:
            self._bar.set_description_str(doing, refresh=False)
            self._bar.refresh()
        elif seconds >= self._due and not others:
            self._say(f"{doing} ({seconds:.0f} s)")
            self._due = seconds + min(seconds, MOST_LINE_SECONDS)

    def _look_often(self) -> None:
        while not self._has_ended.wait(LOOK_SECONDS):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.close()


def show_transformers_progress() -> None:
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as bars

    bars.set_tqdm_hook(lambda factory, arguments, named: Progress(*arguments, **named))
    modeling_gguf_pytorch_utils.tqdm = Progress


def counted(doing: str, names: Collection[str], num_bytes: Callable[[str], int]) -> Iterator[str]:
    sizes = {name: num_bytes(name) for name in names}
    with Progress(desc=doing, total=sum(sizes.values()), unit="B", unit_scale=True) as bar:
        for name, size in sizes.items():
            yield name
            bar.update(size)
