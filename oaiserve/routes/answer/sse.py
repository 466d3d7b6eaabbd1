"""Server-sent events, for all streaming routes."""

from __future__ import annotations

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "x-accel-buffering": "no",  # Without it, nginx holds events back and passes them on together.
}
END = b"\n\n"  # the end of an event
DONE = b"data: [DONE]\n\n"  # the end of a stream in OpenAI's form

_ESCAPES = [(mark.encode(), b"\\u%04x" % ord(mark)) for mark in "\x85\u2028\u2029"]


def event(data: bytes, name: str | None = None) -> bytes:
    """Frame `data`, JSON without line feeds, as one event. Browsers call an event without a name `message`."""
    data = one_line(data)
    if name is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def comment(text: str) -> bytes:
    return b": %b\n\n" % text.encode()


def one_line(data: bytes) -> bytes:
    """Escape the line ends that JSON allows in strings. Clients that split lines as `str.splitlines` or httpx's
    `iter_lines` do would end the event there."""
    if not data.isascii():
        for mark, escape in _ESCAPES:
            data = data.replace(mark, escape)
    return data
