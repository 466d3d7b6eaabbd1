"""Sends requests, or parts of them, over a plain socket whose answer the test reads late or never."""

import socket
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tests.engine.doubles import TIMEOUT_SECONDS

SMALL_BUFFER_BYTES = 4096  # small, so that a short answer fills it


def send_request(
    server: Any, path: str = "/v1/completions", *, request_id: str = "raw", body_bytes: int | None = None, **fields: Any
) -> socket.socket:
    """Send a request, or only the first `body_bytes` of its body, and return its socket without reading the answer.
    The server is a URL, or has a `connect`."""
    body = msgspec.json.encode(fields)
    sock = connected(server) if isinstance(server, str) else server.connect()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: {request_id}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body[:body_bytes])
    return sock


def connected(url: str) -> socket.socket:
    """Return a socket with a small buffer."""
    address = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    sock.settimeout(TIMEOUT_SECONDS)
    sock.connect((address.hostname, address.port))
    return sock
