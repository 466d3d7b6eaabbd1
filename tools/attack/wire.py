"""A client that sends bytes as they are, and reads whatever comes back: answers, or how the connection ended.

It knows nothing of servers and attacks. What the standard clients refuse to send is the point.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MOST_KEPT_BYTES = 64 * 1024  # of a body
MOST_HEAD_BYTES = 1 << 20
READ_BYTES = 1 << 16


class NotHTTP(Exception):
    """What came back is no HTTP."""


@dataclass
class Answer:
    """What came back for one request. `outcome` is the status, or what happened instead of an answer: `closed`,
    `reset`, `timeout`, `refused` (no connection), `cut` (within the body), `endless` (a body that was not over in time)
    or `not HTTP`."""

    outcome: str
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""  # the beginning
    num_body_bytes: int = 0

    @property
    def status(self) -> int | None:
        return int(self.outcome) if self.outcome.isdecimal() else None

    @property
    def error(self) -> dict[str, Any] | None:
        """OpenAI's error object, if the body is one."""
        try:
            body = json.loads(self.body)
        except ValueError:
            return None
        error = body.get("error") if isinstance(body, dict) else None
        return error if isinstance(error, dict) else None


@dataclass(frozen=True)
class Address:
    """Where a server listens, and from which address of this machine a client comes."""

    url: str
    source: str | None = None

    async def connect(self, limit_seconds: float = 10.0) -> Connection:
        """Open a connection, with TLS for https. Raises OSError and TimeoutError."""
        parts = urlsplit(self.url)
        context = None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        local = (self.source, 0) if self.source else None
        opening = asyncio.open_connection(parts.hostname, parts.port, ssl=context, local_addr=local, limit=READ_BYTES)
        return Connection(*await asyncio.wait_for(opening, limit_seconds))


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send the data as fast as the server reads it. Raises OSError."""
        for start in range(0, len(data), 1 << 20):
            self.writer.write(data[start : start + (1 << 20)])
            await self.writer.drain()

    def hold(self) -> None:
        """Read nothing, so that what comes stays in the buffers of the kernel."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def release(self) -> None:
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]

    async def wait_for_bytes(self, limit_seconds: float) -> bool:
        """Wait until something has come on a connection that is held, without reading it. Return whether it has."""
        loop, has_come = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.dup(self.writer.get_extra_info("socket").fileno())  # the transport watches its own
        loop.add_reader(descriptor, has_come.set)
        try:
            async with asyncio.timeout(limit_seconds):
                return await has_come.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    async def answer(self, limit_seconds: float, *, has_body: bool = True) -> Answer:
        """Read one final answer, to HEAD without a body. Never raises: the outcome says what happened."""
        started, answer = time.monotonic(), Answer("closed")
        try:
            async with asyncio.timeout(limit_seconds):
                await self._read_into(answer, has_body)
        except TimeoutError:
            answer.outcome = "endless" if answer.headers else "timeout"
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError) as error:
            is_reset = not isinstance(error, asyncio.IncompleteReadError)
            answer.outcome = "cut" if answer.headers else "reset" if is_reset else "closed"
        except (NotHTTP, ValueError, OSError, asyncio.LimitOverrunError) as error:
            answer.outcome, answer.body = "not HTTP", str(error).encode()[:MOST_KEPT_BYTES]
        answer.seconds = time.monotonic() - started
        return answer

    async def _read_into(self, answer: Answer, has_body: bool) -> None:
        status = 100
        while 100 <= status < 200 and status != 101:
            status, answer.headers = await self._head()
        if not has_body or status in (101, 204, 304):
            pass
        elif "chunked" in answer.headers.get("transfer-encoding", ""):
            while size := int((await self._line()).partition(b";")[0], 16):
                await self._body(answer, size)
                await self._line()
            while await self._line():
                pass
        elif (length := answer.headers.get("content-length")) is not None:
            await self._body(answer, int(length))
        else:
            while part := await self.reader.read(READ_BYTES):
                _keep(answer, part)
        answer.outcome = str(status)

    async def _head(self) -> tuple[int, dict[str, str]]:
        first = await self._line()
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise NotHTTP(repr(first[:200]))
        headers = {}
        while line := await self._line():
            name, _, value = line.partition(b":")
            headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        return int(rest[:3]), headers

    async def _line(self) -> bytes:
        line = await self.reader.readuntil(b"\n")
        return line.rstrip(b"\r\n")

    async def _body(self, answer: Answer, num_bytes: int) -> None:
        while num_bytes:
            part = await self.reader.read(min(num_bytes, READ_BYTES))
            if not part:
                raise asyncio.IncompleteReadError(b"", num_bytes)
            num_bytes -= len(part)
            _keep(answer, part)

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self.writer.transport.abort()
        else:
            self.writer.close()


def _keep(answer: Answer, part: bytes) -> None:
    answer.num_body_bytes += len(part)
    if len(answer.body) < MOST_KEPT_BYTES:
        answer.body += part[: MOST_KEPT_BYTES - len(answer.body)]


def request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """Return a well-formed request. The headers win over those that it would have."""
    found = {"host": "127.0.0.1", "connection": "close"}
    if body or method == "POST":
        found |= {"content-type": "application/json", "content-length": str(len(body))}
    found |= {name.lower(): value for name, value in (headers or {}).items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in found.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
