"""Server-sent events, for all streaming routes."""

from __future__ import annotations

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "x-accel-buffering": "no",  # without it nginx holds events back and passes them on together
}


def event(data: bytes, name: str | None = None) -> bytes:
    """Frame `data`, which must be one line, as one event. Browsers call an event without a name `message`."""
    return b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)
