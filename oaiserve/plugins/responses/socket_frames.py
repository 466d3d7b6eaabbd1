"""The frames of WebSocket (RFC 6455), as a server reads and writes them. This file does no input or output.

No extension is ever negotiated, so no message is compressed, and none can be larger than what the client has sent. No
library is used, because data must be passed on as bytes before its frame is whole, so that limits count it:
`websockets` buffers whole frames, and `wsproto` decodes text.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import sha1
from typing import NamedTuple

VERSION = "13"
MOST_CONTROL_BYTES = 125
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Opcode(IntEnum):
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class CloseCode(IntEnum):
    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    TOO_LARGE = 1009
    TRY_AGAIN_LATER = 1013


class Broken(Exception):
    """The client breaks the protocol, or a limit. The connection must be closed with this code."""

    def __init__(self, code: CloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Event(NamedTuple):
    """The next part of a message, or a control frame. A message `is_last` with its last part."""

    opcode: Opcode  # the message's opcode; never CONTINUATION
    data: bytes
    is_last: bool = True


@dataclass(slots=True)
class _Head:
    opcode: Opcode
    is_last: bool  # frame of its message
    num_left: int  # bytes of its data that have not been read
    mask: bytes
    num_read: int = 0


class Reader:
    """Reads the frames of a client. Data may come in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._message: Opcode | None = None  # the message whose next frame must be a continuation

    def push(self, data: bytes | bytearray) -> None:
        self._buffer += data

    def next(self) -> Event | None:
        """Return the next event, or None if more data is needed. Raises Broken."""
        if self._head is None:
            self._head = self._read_head()
        head = self._head
        if head is None or (head.num_left and not self._buffer):
            return None
        if head.opcode >= Opcode.CLOSE and len(self._buffer) < head.num_left:
            return None
        part = bytes(self._buffer[: head.num_left])
        del self._buffer[: len(part)]
        data = _masked(part, head.mask, head.num_read)
        head.num_left -= len(part)
        head.num_read += len(part)
        is_over = not head.num_left
        if is_over:
            self._head = None
        if head.opcode >= Opcode.CLOSE:
            return Event(head.opcode, data)
        if head.opcode != Opcode.CONTINUATION:
            self._message = head.opcode
            head.opcode = Opcode.CONTINUATION
        assert self._message is not None
        event = Event(self._message, data, is_over and head.is_last)
        if event.is_last:
            self._message = None
        return event

    def _read_head(self) -> _Head | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        first = buffer[0]
        second = buffer[1]
        if first & 0x70:
            raise Broken(CloseCode.PROTOCOL_ERROR, "no extension was negotiated")
        if not second & 0x80:
            raise Broken(CloseCode.PROTOCOL_ERROR, "a client must mask its frames")
        length = second & 0x7F
        size = {126: 2, 127: 8}.get(length, 0)
        if len(buffer) < 2 + size + 4:
            return None
        if size:
            length = int.from_bytes(buffer[2 : 2 + size])
        try:
            opcode = Opcode(first & 0x0F)
        except ValueError:
            raise Broken(CloseCode.PROTOCOL_ERROR, "unknown kind of frame") from None
        is_last = bool(first & 0x80)
        if opcode >= Opcode.CLOSE and (length > MOST_CONTROL_BYTES or not is_last):
            raise Broken(CloseCode.PROTOCOL_ERROR, f"a control frame has at most {MOST_CONTROL_BYTES} bytes")
        if opcode < Opcode.CLOSE and (opcode == Opcode.CONTINUATION) != (self._message is not None):
            raise Broken(CloseCode.PROTOCOL_ERROR, "a message continues that has not begun, or begins in another")
        mask = bytes(buffer[2 + size : 2 + size + 4])
        del buffer[: 2 + size + 4]
        return _Head(opcode, is_last, length, mask)


def _masked(data: bytes, mask: bytes, offset: int) -> bytes:
    mixed = bytearray(len(data))
    for place in range(4):  # A byte of the mask changes every fourth byte of the data.
        mixed[place::4] = data[place::4].translate(_table_of(mask[(offset + place) % 4]))
    return bytes(mixed)


@cache
def _table_of(mask: int) -> bytes:
    return bytes(byte ^ mask for byte in range(256))


def frame(opcode: Opcode, data: bytes) -> bytes:
    """Return a whole message of a server, or a control frame."""
    length = len(data)
    if length < 126:
        head = bytes((0x80 | opcode, length))
    elif length < 2**16:
        head = bytes((0x80 | opcode, 126)) + length.to_bytes(2)
    else:
        head = bytes((0x80 | opcode, 127)) + length.to_bytes(8)
    return head + data


def close_frame(code: CloseCode, reason: str = "") -> bytes:
    return frame(Opcode.CLOSE, code.to_bytes(2) + reason.encode()[: MOST_CONTROL_BYTES - 2])


def accept_value(key: str) -> str:
    """Return the header `sec-websocket-accept` for the client's `sec-websocket-key`."""
    return b64encode(sha1(key.encode("latin-1") + _GUID, usedforsecurity=False).digest()).decode()
