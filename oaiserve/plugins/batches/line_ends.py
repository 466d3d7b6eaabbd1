"""Reads forms whose lines end in LF, as programs write them that treat a body as text. Their files don't change."""

from __future__ import annotations

from typing import Literal

# Beyond this many bytes of one header, the rest is passed on as it is, which the parser refuses.
MOST_LINE_BYTES = 2**16


class CrLf:
    """Gives delimiters and headers of a form the line ends that its parser requires, if the first line ends in LF."""

    def __init__(self, boundary: bytes) -> None:
        self._marker = b"--" + boundary
        self._held = b""
        self._at: Literal["first line", "delimiter", "headers", "content", "as it is"] = "first line"

    def fed(self, data: bytes) -> bytes:
        """Return the bytes for the parser, which may be none yet."""
        if self._at == "as it is":
            return data
        self._held += data
        read = b""
        while (part := self._next()) is not None:
            read += part
        return read

    def rest(self) -> bytes:
        """Return the bytes that were held back. Call this at the end of the form."""
        rest = self._held
        self._held = b""
        return rest

    def _next(self) -> bytes | None:
        """Return the next part that is complete, or None if more has to arrive."""
        held = self._held
        marker = self._marker
        if self._at == "first line":
            if len(held) <= len(marker) and marker.startswith(held):
                return None
            self._at = "delimiter" if held.startswith(marker + b"\n") else "as it is"
            return b""
        if self._at == "delimiter":  # `held` begins with the marker, or is a prefix of it.
            if len(held) <= len(marker):
                return None
            if held.startswith(marker + b"\n"):
                self._at = "headers"
                return self._passed(len(marker) + 1, marker + b"\r\n")
            self._at = "as it is"  # the last one, or none
        if self._at == "headers":
            line, end, _ = held.partition(b"\n")
            if end:
                if line in (b"", b"\r"):
                    self._at = "content"
                return self._passed(len(line) + 1, line.removesuffix(b"\r") + b"\r\n")
            if len(held) <= MOST_LINE_BYTES:
                return None
            self._at = "as it is"
        if self._at == "content":
            index = held.find(b"\n" + marker)
            if index >= 0:
                self._at = "delimiter"
                return self._passed(index + 1, held[:index] + b"\r\n")
            index = max(0, len(held) - len(marker))  # A marker may have begun.
            return self._passed(index, held[:index]) if index else None
        return self._passed(len(held), held) if held else None

    def _passed(self, num_bytes: int, instead: bytes) -> bytes:
        self._held = self._held[num_bytes:]
        return instead
