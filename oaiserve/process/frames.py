"""Frames: how messages follow each other in a stream of bytes. Each has its length before it. Stdlib only."""

from __future__ import annotations

_LENGTH_BYTES = 4
MOST_BYTES = 2**32 - 1


def framed(message: bytes) -> bytes:
    """Return a message with its length before it. Raises ValueError above 4 GiB."""
    if len(message) > MOST_BYTES:
        raise ValueError(f"a message has {len(message)} bytes, and may have {MOST_BYTES}")
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


class Frames:
    """Splits a stream into its messages, wherever the parts of the stream were cut."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def push(self, part: bytes) -> list[bytes]:
        """Take the next part, and return the messages that it completes."""
        rest = self._rest
        rest += part
        messages = []
        at = 0
        while len(rest) - at >= _LENGTH_BYTES:
            begin = at + _LENGTH_BYTES
            end = begin + int.from_bytes(rest[at:begin], "little")
            if end > len(rest):
                break
            messages.append(bytes(rest[begin:end]))
            at = end
        del rest[:at]
        return messages
