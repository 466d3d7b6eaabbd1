"""The capabilities of the terminal that a stream writes to: its width, colours and links. Stdlib only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TextIO

Style = Literal["bold", "dim", "red", "yellow", "green"]
_CODES: dict[Style, int] = {"bold": 1, "dim": 2, "red": 31, "yellow": 33, "green": 32}


def _no_width() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Screen:
    """The capabilities of a terminal. The defaults are those of a file or a pipe."""

    columns: Callable[[], int | None] = _no_width  # None: lines may have any length
    has_colours: bool = False
    has_links: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """Return the capabilities of the terminal that a stream writes to. NO_COLOR turns colours off."""
        if not stream.isatty():
            return cls()

        def columns() -> int | None:
            try:
                return os.get_terminal_size(stream.fileno()).columns or None
            except OSError:
                return None

        is_simple = os.environ.get("TERM", "dumb") in ("dumb", "linux")
        has_colours = os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
        return cls(columns, has_colours, has_links=not is_simple)

    def painted(self, text: str, *styles: Style) -> str:
        if not self.has_colours or not styles or not text:
            return text
        return f"\x1b[{';'.join(str(_CODES[style]) for style in styles)}m{text}\x1b[0m"

    def linked(self, text: str, url: str | None) -> str:
        """Return text that opens the URL when it is clicked, in terminals that know OSC 8."""
        if self.has_links and url:
            return f"\x1b]8;;{url}\x1b\\{text}\x1b]8;;\x1b\\"
        return text
