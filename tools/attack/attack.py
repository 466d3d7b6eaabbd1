"""Defines an attack as data, and the `Strike` that its code sends requests and checks answers with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from tools.attack.wire import Answer, Connection, connect, few_at_once

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ATTACKER_KEY = "key-of-the-attacker"
NEIGHBOUR_KEY = "key-of-the-neighbour"
ATTACKER_ADDRESS = "127.0.0.2"
NEIGHBOUR_ADDRESS = "127.0.0.3"
MOST_SHOWN_BYTES = 700  # bytes shown of a request whose answer is a server error
HI = [{"role": "user", "content": "Hi"}]

Sent = bytes | Callable[[Connection], Awaitable[None]]  # the bytes of a request, or what sends them
Harmless = Callable[[bytes], bytes]  # returns a request without what is hostile about it
Number = Callable[[int, int], int]  # picks the number to send from that of a full and that of a quick run
Requests = Callable[[Number], Iterable[Sent]]


def request(
    method: str,
    path: str,
    body: bytes | Mapping[str, Any] = b"",
    headers: Mapping[str, str] | None = None,
    *,
    key: str | None = ATTACKER_KEY,
) -> bytes:
    """Return a well-formed request. The headers win over those that it would have."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers_of_body = {"host": "127.0.0.1", "connection": "close"}
    if content or method == "POST":
        headers_of_body |= {"content-type": "application/json", "content-length": str(len(content))}
    if key is not None:
        headers_of_body["authorization"] = f"Bearer {key}"
    headers_of_body |= {name.lower(): value for name, value in (headers or {}).items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers_of_body.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + content


post = partial(request, "POST")


def of_same_size(data: bytes) -> bytes:
    """Return a request with a body of the same length, which is refused at its first byte."""
    head, separator, body = data.partition(b"\r\n\r\n")
    return head + separator + b"x" * len(body)


class Strike:
    """One run of an attack: it sends, and notes what was sent, what came back, and what went wrong.

    Each request is counted when it begins. So one whose answer never comes is missing among the answers.
    """

    def __init__(
        self,
        url: str,
        *,
        quick: bool,
        answer_seconds: float,
        harmless: Harmless | None = None,
    ) -> None:
        """With `harmless`, what it returns is sent instead of each request, and the answers aren't checked."""
        self._harmless = harmless
        self.url = url
        self._quick = quick
        self.answer_seconds = answer_seconds
        self.num_sent = 0
        self.answers: list[Answer] = []
        self.problems: list[str] = []

    @property
    def is_complete(self) -> bool:
        return len(self.answers) == self.num_sent and all(answer.status is not None for answer in self.answers)

    def number(self, full: int, quick: int) -> int:
        """Return how many to send in this run."""
        return quick if self._quick else full

    def check(self, holds: bool, problem: str) -> None:
        if not holds and self._harmless is None:
            self.problems.append(problem)

    async def connect(self) -> Connection:
        """Open a connection. Raises OSError and TimeoutError."""
        return await connect(self.url, ATTACKER_ADDRESS)

    async def ask(self, data: Sent) -> Answer:
        """Send the bytes, or what a function sends, on a connection of its own, and return what came back first."""
        self.num_sent += 1
        if self._harmless is not None and isinstance(data, bytes):
            data = self._harmless(data)
        started = time.monotonic()
        try:
            connection = await self.connect()
        except OSError as error:
            answer = Answer("timeout" if isinstance(error, TimeoutError) else "refused")
        else:
            # A server may answer before it has read everything.
            sending = asyncio.create_task(_send(connection, data))
            try:
                has_body = not (isinstance(data, bytes) and data.startswith(b"HEAD "))
                answer = await connection.answer(self.answer_seconds, has_body=has_body)
            finally:
                sending.cancel()
                connection.close()
        answer.seconds = time.monotonic() - started
        answer.sent = data[:MOST_SHOWN_BYTES] if isinstance(data, bytes) else b""
        self.answers.append(answer)
        return answer

    async def ask_all(self, requests: Iterable[Sent], at_once: int) -> None:
        await few_at_once([partial(self.ask, each) for each in requests], at_once)

    async def leave_all(self, requests: Iterable[bytes], at_once: int, after_seconds: float) -> None:
        """Send each and reset its connection. Nobody is there to see an answer, which counts as `left`."""

        async def leave(data: bytes) -> None:
            self.num_sent += 1
            self.answers.append(Answer("left"))
            with contextlib.suppress(OSError, TimeoutError):
                connection = await self.connect()
                await connection.send(data)
                await asyncio.sleep(after_seconds)
                connection.close(reset=True)

        await few_at_once([partial(leave, each) for each in requests], at_once)


async def _send(connection: Connection, data: Sent) -> None:
    with contextlib.suppress(OSError):  # the answer, or how the connection ended, says more
        await (connection.send(data) if isinstance(data, bytes) else data(connection))


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack with its limits. The defaults are what every attack has to keep."""

    name: str
    family: str
    of_class: str  # class of flaws that were found in such servers
    sends: str  # what is sent, for the table
    run: Callable[[Strike], Awaitable[None]]
    outcomes: frozenset[str]  # what may come back: statuses, or ways in which a connection may end
    server: str = "keys"  # the kind of server, one of tools.attack.server.KINDS
    bare: bool = False  # a 400 in plain text is allowed, because no request was understood
    answer_seconds: float = 30.0  # the longest wait for an answer
    limit_seconds: float = 60.0  # the longest run
    # Part of it is accepted, and computed in the same steps as the neighbour's tokens: then steps take longer.
    is_work: bool = False
    most_itl_ratio: float = 2.0  # the neighbour's ITL p99, to its own without the attack; not asked of work
    # The neighbour also waits for the bytes of requests, and for work that they ask for honestly. So harmless requests
    # take turns with the attack, `rounds` times, and the median of the ratios to the ITL p99 beside them has a limit.
    harmless: Harmless | None = None
    most_ratio_to_harmless: float = 1.2
    rounds: int = 5
    requests: Requests | None = None  # what a burst sends


Run = Callable[[Strike], Awaitable[None]]


class Family:
    """Attacks of one kind. A function becomes one of them by a decorator, and gives it its name."""

    def __init__(self, name: str, of_class: str) -> None:
        self.name = name
        self.of_class = of_class
        self.attacks: list[Attack] = []

    def attack(self, sends: str, outcomes: frozenset[str], **limits: Any) -> Callable[[Run], Run]:
        """Add what a function does. `limits` are further fields of Attack."""

        def add(run: Run) -> Run:
            about = {"name": run.__name__.replace("_", "-"), "family": self.name, "of_class": self.of_class} | limits
            self.attacks.append(Attack(sends=sends, run=run, outcomes=outcomes, **about))
            return run

        return add

    def burst(
        self, sends: str, outcomes: frozenset[str], at_once: int, **limits: Any
    ) -> Callable[[Requests], Requests]:
        """Add the requests that a function returns. They have connections of their own, `at_once` of them at a time."""

        def add(requests: Requests) -> Requests:
            @wraps(requests)
            async def run(strike: Strike) -> None:
                await strike.ask_all(requests(strike.number), at_once)

            self.attack(sends, outcomes, requests=requests, **limits)(run)
            return requests

        return add


def outcomes(*allowed: int | str) -> frozenset[str]:
    return frozenset(map(str, allowed))


REFUSED = outcomes(400, 401, 403, 404, 405, 408, 413, 415, 421, 422, 429, 431, 503)
ENDED = outcomes("closed", "reset")  # a connection that the server ended without an answer
FULL = outcomes(429, 503)  # what a busy server may always answer
