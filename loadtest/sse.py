"""Split the bytes of a stream into server-sent events, however the network cuts them. Stdlib only.

Lines end with LF or CRLF, as servers write them. `str.splitlines` would also cut at U+0085, U+2028 and other
characters that JSON may contain unescaped.
"""

from __future__ import annotations

DONE = b"[DONE]"


class EventSplitter:
    """A parser for one response. `feed` takes the reads in order and returns the data of each event they complete."""

    def __init__(self) -> None:
        self._rest = bytearray()  # an incomplete line
        self._data: list[bytes] = []  # the data lines of an event that is not complete

    def feed(self, data: bytes) -> list[bytes]:
        events: list[bytes] = []
        self._rest += data
        if b"\n" not in data:
            return events
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events
