"""A client of WebSockets, for tests: it may also break the protocol."""

from __future__ import annotations

import json
import socket
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from oaiserve.plugins.responses.socket_frames import Opcode, accept_value
from tests.serving import Served

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
MASK = b"\x01\x02\x03\x04"
TIMEOUT_SECONDS = 60


def masked(opcode: int, data: bytes, *, is_last: bool = True, mask: bytes = MASK) -> bytes:
    """Return a frame of a client."""
    size = len(data)
    if size < 126:
        length = bytes((0x80 | size,))
    elif size < 2**16:
        length = bytes((0x80 | 126,)) + size.to_bytes(2)
    else:
        length = bytes((0x80 | 127,)) + size.to_bytes(8)
    # Integers are combined at once; a loop over the bytes of a large frame takes a tenth of a second.
    repeated = (mask * (size // 4 + 1))[:size]
    mixed = (int.from_bytes(data) ^ int.from_bytes(repeated)).to_bytes(size)
    return bytes((is_last << 7 | opcode,)) + length + mask + mixed


class WebSocket:
    """An open socket, or a refused one: then `status` and `head` say why."""

    def __init__(self, server: str | Served, path: str = "/v1/responses", version: str = "1.1", **headers: str) -> None:
        """Connect to a server, or to the one at a URL."""
        address = urlsplit(server if isinstance(server, str) else server.url)
        if isinstance(server, str):
            self._sock: Any = socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_SECONDS)
        else:
            self._sock = server.connect()
        self._file = self._sock.makefile("rb")
        given = {
            "host": f"{address.hostname}:{address.port}",
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": KEY,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = [f"GET {path} HTTP/{version}", *(f"{name}: {value}" for name, value in given.items())]
        self.send_raw("\r\n".join([*lines, "", ""]).encode())
        self.head = b"".join(iter(self._file.readline, b"\r\n")).decode()
        self.status = int(self.head.split(" ")[1])
        assert self.status != 101 or f"sec-websocket-accept: {accept_value(KEY)}" in self.head

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._sock.close()

    def send_raw(self, data: bytes) -> None:
        self._sock.sendall(data)

    def send(self, **event: Any) -> None:
        self.send_raw(masked(Opcode.TEXT, json.dumps(event).encode()))

    def create(self, **body: Any) -> None:
        self.send(type="response.create", **{"input": "Hi", **body})

    def frame(self) -> tuple[int, bytes]:
        """Return the next frame that is not a ping of the server: its opcode and its data."""
        first, length = self._file.read(2)
        if length > 125:
            length = int.from_bytes(self._file.read(2 if length == 126 else 8))
        data = self._file.read(length)
        if first & 0x0F == Opcode.PING:
            return self.frame()
        return first & 0x0F, data

    def rest(self) -> bytes:
        """Return what the server still sends before it ends the connection."""
        return self._file.read()

    def event(self) -> dict[str, Any]:
        opcode, data = self.frame()
        assert opcode == Opcode.TEXT, (opcode, data)
        event: dict[str, Any] = json.loads(data)
        return event

    def until(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events up to the first one of these kinds."""
        events = [self.event()]
        while events[-1]["type"] not in kinds:
            events.append(self.event())
        return events

    def response(self) -> dict[str, Any]:
        """Return the next response, at its end."""
        response: dict[str, Any] = self.until("response.completed", "response.incomplete", "response.failed")[-1][
            "response"
        ]
        return response

    def closed(self) -> tuple[int, str]:
        """Return the code and the reason with which the server closes the socket, and wait for its end."""
        opcode, data = self.frame()
        assert opcode == Opcode.CLOSE, (opcode, data)
        assert self.rest() == b""
        return int.from_bytes(data[:2]), data[2:].decode()
