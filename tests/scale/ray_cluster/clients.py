"""Clients that read streams one after the other, and say of each exactly how it ended."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum

SILENT_SECONDS = 15.0  # without a byte, a request hangs
KEY = "a-key"  # which a server without keys ignores


class End(StrEnum):
    WHOLE = "whole"
    ERROR_EVENT = "error event"  # in a stream that had begun
    ERROR = "error"  # OpenAI's object, with a status
    CUT = "cut"  # within a stream, without an error event
    CLOSED = "closed"  # before the status line
    OTHER = "other"  # a status with a body that is not the API's
    REFUSED = "refused"  # no connection
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Answer:
    end: End
    began: float  # of the monotonic clock, in seconds
    ended: float
    detail: str = ""


@dataclass
class Clients:
    """So many clients, each with a thread's event loop, until `stop`."""

    port: int
    number: int = 8
    tokens: int = 40
    body: bytes = b""
    answers: list[Answer] = field(default_factory=list)
    _is_stopping: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def stop(self) -> list[Answer]:
        """Let the requests under way end, and return all answers."""
        self._is_stopping = True
        assert self._thread is not None
        self._thread.join(4 * SILENT_SECONDS)
        return self.answers

    async def _run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self.number)))

    async def _client(self, number: int) -> None:
        chance = random.Random(number)
        while not self._is_stopping:
            began = time.monotonic()
            content = self.body or question(f"{number} {chance.random()}", self.tokens)
            end, detail = await ask(self.port, content)
            self.answers.append(Answer(end, began, time.monotonic(), detail))
            if end is not End.WHOLE:
                await asyncio.sleep(0.02)


def question(text: str, tokens: int) -> bytes:
    """Return the body of a request for a stream of so many tokens."""
    body = {"prompt": text, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    return json.dumps(body).encode()


async def ask(port: int, content: bytes) -> tuple[End, str]:
    """Ask for a stream and return how it ended, with what was read last."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return End.REFUSED, str(error)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (KEY.encode(), len(content))
        )
        writer.write(content)
        read = b""
        while True:
            data = await asyncio.wait_for(reader.read(65536), SILENT_SECONDS)
            if not data:
                return _end_of(read)
            read += data
    except TimeoutError:
        return End.HUNG, read[-200:].decode(errors="replace")
    except OSError as error:
        return (End.CUT if b" 200 " in read[:20] else End.CLOSED), str(error)
    finally:
        writer.transport.abort()


def _end_of(read: bytes) -> tuple[End, str]:
    head, _, rest = read.partition(b"\r\n\r\n")
    shown = read[-200:].decode(errors="replace")
    if not head:
        return End.CLOSED, ""
    if b" 200 " in head[:20]:
        if b'data: {"error"' in rest:
            return End.ERROR_EVENT, shown
        return (End.WHOLE, "") if b"data: [DONE]" in rest else (End.CUT, shown)
    is_ours = b'{"error":{' in rest.replace(b" ", b"")
    status = head[:40].split(b"\r\n")[0].decode(errors="replace")
    return (End.ERROR if is_ours else End.OTHER), f"{status} {shown}"
