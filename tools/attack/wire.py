"""A client that sends bytes as they are, and reads whatever comes back: answers, or how the connection ended.

It knows nothing of servers and attacks. What the standard clients refuse to send is the point.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11

MOST_KEPT_BYTES = 64 * 1024  # bytes stored of a body
MOST_HEAD_BYTES = 1 << 20
READ_BYTES = 1 << 16

Found = TypeVar("Found")


@dataclass
class Answer:
    """What came back for one request. `outcome` is the status, or what happened instead of an answer: `closed`,
    `reset`, `timeout`, `refused` (no connection), `cut` (within the body), `endless` (a body that was not over in time)
    or `not HTTP`."""

    outcome: str
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""  # the beginning
    sent: bytes = b""  # the beginning of the request

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


async def connect(url: str, source: str | None = None, limit_seconds: float = 10.0) -> Connection:
    """Open a connection from the address `source` of this machine. Raises OSError and TimeoutError."""
    parts = urlsplit(url)
    local = (source, 0) if source else None
    opening = asyncio.open_connection(parts.hostname, parts.port, local_addr=local, limit=READ_BYTES)
    return Connection(*await asyncio.wait_for(opening, limit_seconds))


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send the data as fast as the server reads it. Raises OSError."""
        for start in range(0, len(data), 1 << 20):
            self.writer.write(data[start : start + (1 << 20)])
            await self.writer.drain()

    async def answer(self, limit_seconds: float, *, has_body: bool = True) -> Answer:
        """Read one final answer, to HEAD without a body. Never raises: the outcome says what happened."""
        started = time.monotonic()
        answer = Answer("closed")
        try:
            async with asyncio.timeout(limit_seconds):
                answer.outcome = await self._read_into(answer, has_body)
        except TimeoutError:
            answer.outcome = "endless" if answer.headers else "timeout"
        except (ConnectionResetError, BrokenPipeError):
            answer.outcome = "cut" if answer.headers else "reset"
        except (h11.RemoteProtocolError, OSError) as error:
            answer.body = str(error).encode()[:MOST_KEPT_BYTES]
            answer.outcome = "not HTTP"
        answer.seconds = time.monotonic() - started
        return answer

    async def _read_into(self, answer: Answer, has_body: bool) -> str:
        """Read the headers and the body of an answer, and return its outcome."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD_BYTES)
        # It reads answers to a request that it knows of; which one does not matter.
        parser.send(h11.Request(method="GET" if has_body else "HEAD", target="/", headers=[("host", "any")]))
        parser.send(h11.EndOfMessage())
        status = "closed"
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError:
                if parser.trailing_data[1]:  # the end of the connection came too early
                    return "cut" if answer.headers else "closed"
                raise
            if event is h11.NEED_DATA:
                parser.receive_data(await self.reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                status = str(event.status_code)
                answer.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                answer.body += event.data[: MOST_KEPT_BYTES - len(answer.body)]
            elif isinstance(event, h11.EndOfMessage):
                return status

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self.writer.transport.abort()
        else:
            self.writer.close()


async def few_at_once(calls: Iterable[Callable[[], Awaitable[Found]]], at_once: int) -> list[Found]:
    """Await all of these in order, `at_once` at a time, and return their results."""
    limit = asyncio.Semaphore(at_once)

    async def one(call: Callable[[], Awaitable[Found]]) -> Found:
        async with limit:
            return await call()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(call)) for call in calls]
    return [task.result() for task in tasks]
