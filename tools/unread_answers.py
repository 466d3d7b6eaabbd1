"""Clients that ask for large answers and read nothing, and what they cost a server: how far its memory grows."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SMALL_BUFFER_BYTES = 4096
POLL_SECONDS = 0.2
MIB = 2**20


@dataclass(frozen=True)
class UnreadAnswers:
    """The memory of the server, and what was read in the end."""

    start_mib: float
    peak_mib: float
    num_cut: int  # answers that the server did not hold for the client: the connection ended, or an error came
    answer_bytes: int  # of the largest answer, as read in the end

    @property
    def gained_mib(self) -> float:
        return self.peak_mib - self.start_mib


def unread_answers(
    url: str,
    pid: int,
    body: Mapping[str, Any],
    *,
    path: str = "/v1/chat/completions",
    num_clients: int = 8,
    quiet_seconds: float = 3.0,
    limit_seconds: float = 600.0,
) -> UnreadAnswers:
    """Send the request on so many connections and read nothing until the server does nothing more for them: it has
    used no CPU for `quiet_seconds`. Then read all answers, one after the other.

    The peak is that of the whole time, and is reset before: so the server must belong to the same user.
    """
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
    start_mib = _status_mib(pid, "VmRSS")
    with ExitStack() as stack:
        clients = [stack.enter_context(_sent(url, path, body)) for _ in range(num_clients)]
        _wait_until_quiet(pid, quiet_seconds, limit_seconds)
        sizes = [_size_of_answer(client) for client in clients]
    read = [size for size in sizes if size is not None]
    return UnreadAnswers(start_mib, _status_mib(pid, "VmHWM"), len(sizes) - len(read), max(read, default=0))


def _sent(url: str, path: str, body: Mapping[str, Any]) -> socket.socket:
    address, content = urlsplit(url), json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    sock.connect((address.hostname, address.port))
    head = f"POST {path} HTTP/1.1\r\nhost: unread\r\nconnection: close\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return sock


def _wait_until_quiet(pid: int, quiet_seconds: float, limit_seconds: float) -> None:
    """Wait until the process computes nothing any more. Raises TimeoutError."""
    give_up = time.monotonic() + limit_seconds
    before, quiet_since = _cpu_seconds(pid), time.monotonic()
    while time.monotonic() - quiet_since < quiet_seconds:
        if time.monotonic() > give_up:
            raise TimeoutError(f"the server still computes after {limit_seconds:.0f} s")
        time.sleep(POLL_SECONDS)
        now = _cpu_seconds(pid)
        if now - before > POLL_SECONDS / 4:  # the event loop and telemetry take a little at any time
            quiet_since = time.monotonic()
        before = now


def _size_of_answer(client: socket.socket) -> int | None:
    """Read to the end of the connection, and return the number of bytes; None for an answer that was not given."""
    size, begin, end = 0, b"", b""
    client.settimeout(60)
    try:
        while data := client.recv(MIB):
            size += len(data)
            begin, end = begin or data[:64], (end + data)[-16:]
    except ConnectionResetError:
        return None
    is_whole = begin.startswith(b"HTTP/1.1 200") and end.rstrip().endswith((b"}", b"0", b"[DONE]"))
    return size if is_whole else None


def _status_mib(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
