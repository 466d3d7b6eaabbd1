"""Defines an attack as data, and the `Strike` that its code sends requests and checks answers with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.attack.wire import Address, Answer, Connection, request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ATTACKER_KEY, NEIGHBOUR_KEY = "key-of-the-attacker", "key-of-the-neighbour"
ATTACKER_ADDRESS, NEIGHBOUR_ADDRESS = "127.0.0.2", "127.0.0.3"
HI = [{"role": "user", "content": "Hi"}]

Sent = bytes | Callable[[Connection], Awaitable[None]]


class Strike:
    """One run of an attack: it sends, and notes what was sent, what came back, and what went wrong.

    Each request is counted when it begins. So one whose answer never comes is missing among the answers.
    """

    def __init__(self, url: str, pid: int, log_file: Path, *, quick: bool, answer_seconds: float) -> None:
        self.url, self.pid, self._log_file, self._quick = url, pid, log_file, quick
        self.answer_seconds = answer_seconds
        self.num_sent = 0
        self.num_planned = 0
        self.answers: list[Answer] = []
        self.problems: list[str] = []
        self._log_start = log_file.stat().st_size

    @property
    def is_complete(self) -> bool:
        return len(self.answers) == self.num_sent and all(answer.status is not None for answer in self.answers)

    def number(self, full: int, quick: int) -> int:
        """Return how many to send in this run."""
        return quick if self._quick else full

    @property
    def log(self) -> bytes:
        """Return what the server has logged since the run began."""
        with self._log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read()

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    async def connect(self, source: str | None = ATTACKER_ADDRESS, *, plain: bool = False) -> Connection:
        """Open a connection; `plain` without TLS, though the server serves it. Raises OSError and TimeoutError."""
        return await Address(self.url.replace("https:", "http:") if plain else self.url, source).connect()

    async def raw(self, data: Sent, **options: Any) -> Answer:
        """Send the bytes on a connection of their own, and return what came back first."""
        return (await self.exchange(data, most_answers=1, **options))[0]

    async def exchange(
        self,
        data: Sent,
        *,
        source: str | None = ATTACKER_ADDRESS,
        plain: bool = False,
        most_answers: int = 9,
        quiet_seconds: float = 3.0,
    ) -> list[Answer]:
        """Send the bytes, or what a function sends, and return all answers that come back until the server closes or
        is quiet. The first one has `answer_seconds`. Counts as one request with one answer, the first."""
        self.num_sent += 1
        started = time.monotonic()
        try:
            connection = await self.connect(source, plain=plain)
        except TimeoutError:
            answers = [Answer("timeout")]
        except OSError:
            answers = [Answer("refused")]
        else:
            # A server may answer before it has read everything.
            sending = asyncio.create_task(_send(connection, data))
            try:
                answers = [await connection.answer(self.answer_seconds)]
                while len(answers) < most_answers and answers[-1].status is not None:
                    answers.append(await connection.answer(quiet_seconds))
                if len(answers) > 1 and answers[-1].outcome in ("timeout", "closed", "reset"):
                    answers.pop()
            finally:
                sending.cancel()
                connection.close()
        answers[0].seconds = time.monotonic() - started
        self.answers.append(answers[0])
        return answers

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] = b"",
        headers: Mapping[str, str] | None = None,
        *,
        key: str | None = ATTACKER_KEY,
        source: str | None = ATTACKER_ADDRESS,
    ) -> Answer:
        """Send a well-formed request with the attacker's key."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"authorization": f"Bearer {key}"} if key is not None else {}
        return await self.raw(request(method, path, content, given | dict(headers or {})), source=source)

    async def post(self, path: str, body: bytes | Mapping[str, Any], **options: Any) -> Answer:
        return await self.ask("POST", path, body, **options)

    async def all(self, sends: Iterable[Callable[[], Awaitable[object]]], at_once: int) -> None:
        """Do all of these, so many at a time."""
        left = list(sends)
        self.num_planned += len(left)
        left.reverse()

        async def work() -> None:
            while left:
                await left.pop()()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(left))):
                group.create_task(work())


async def _send(connection: Connection, data: Sent) -> None:
    with contextlib.suppress(OSError):  # the answer, or how the connection ended, says more
        await (connection.send(data) if isinstance(data, bytes) else data(connection))


@dataclass(frozen=True)
class Attack:
    """One attack with its limits. The defaults are what every attack has to keep."""

    name: str
    sends: str  # what is sent, for the table
    run: Callable[[Strike], Awaitable[None]]
    outcomes: frozenset[str]  # what may come back: statuses, or ways in which a connection may end
    server: str = "keys"  # the kind of server, one of tools.attack.server.KINDS
    bare: bool = False  # a 400 in plain text is allowed, because no request was understood
    answer_seconds: float = 30.0  # the longest wait for an answer
    limit_seconds: float = 60.0  # the longest run
    # Part of it is accepted, and computed in the same steps as the neighbour's tokens: then steps take longer.
    is_work: bool = field(default=False, kw_only=True)
    # The neighbour's ITL p99, to its own without the attack; not asked of work.
    most_itl_ratio: float = field(default=2.0, kw_only=True)
    # The server may end in order: what is open is finished, and what comes later is refused.
    ends_server: bool = field(default=False, kw_only=True)

    @property
    def family(self) -> str:
        return getattr(self.run, "func", self.run).__module__.rpartition(".")[2]  # it may be a partial


def outcomes(*allowed: int | str) -> frozenset[str]:
    return frozenset(map(str, allowed))


REFUSED = outcomes(400, 401, 403, 404, 405, 408, 413, 415, 421, 422, 429, 431, 503)
ENDED = outcomes("closed", "reset")  # a connection that the server ended without an answer
FULL = outcomes(429, 503)  # what a busy server may always answer


def counted(answers: Iterable[Answer]) -> dict[str, int]:
    return dict(sorted(Counter(answer.outcome for answer in answers).items()))
