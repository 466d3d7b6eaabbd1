"""Requests that may have ended an engine process (`Suspects`), and prompts that did and are refused (`Quarantine`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from hashlib import blake2b

from oaiserve.engine.request import Request
from oaiserve.errors import RequestQuarantined
from oaiserve.process.open_answer import OpenAnswer
from oaiserve.process.plain_data import encode

MOST_DEATHS = 2  # engine processes that one request may end
MOST_QUARANTINED = 1024  # hashes of prompts


class Suspects:
    """Requests that may have ended a process. The next process gets them one at a time, each once the previous one has
    got further than before. It has no lock of its own."""

    def __init__(self) -> None:
        self._waiting: deque[OpenAnswer] = deque()
        self._current: OpenAnswer | None = None  # the suspect that the process has now

    def __bool__(self) -> bool:
        """Return whether any suspects are waiting."""
        return bool(self._waiting)

    def clear(self) -> None:
        """Forget the waiting suspects, because the process has ended."""
        self._waiting.clear()
        self._current = None

    def wait(self, answers: Iterable[OpenAnswer]) -> None:
        self._waiting.extend(answer for answer in answers if answer.num_deaths)

    def next(self, open_ids: Container[str]) -> OpenAnswer | None:
        """Return the next suspect for the process, or None if none is left or the previous one has not got further."""
        before = self._current
        if before is not None and before.request.request_id in open_ids and not before.has_progressed:
            return None
        self._current = None
        while self._waiting:
            answer = self._waiting.popleft()
            if answer.request.request_id in open_ids:
                self._current = answer
                return answer
        return None


class Quarantine:
    """The hashes of prompts that have ended engine processes."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def add(self, request: Request) -> None:
        """Refuse the request's prompts from now on."""
        self._keys[key_of(request)] = None
        if len(self._keys) > MOST_QUARANTINED:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, request: Request) -> bool:
        return bool(self._keys) and key_of(request) in self._keys


def key_of(request: Request) -> bytes:
    """Return a hash of a request's prompts, which identifies a request that is sent again."""
    return blake2b(encode(request.prompts), digest_size=16).digest()


def refusal() -> RequestQuarantined:
    return RequestQuarantined(
        f"The engine has ended {MOST_DEATHS} times while it computed this request, so this server refuses its prompt."
    )
