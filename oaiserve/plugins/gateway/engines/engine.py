"""`ForeignEngine`: one engine that is not ours, with its connections and what is known of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.engines.identity import Identity
from oaiserve.plugins.gateway.engines.presence import Presences
from oaiserve.plugins.gateway.engines.reported import Reported
from oaiserve.plugins.gateway.sources import Resolve
from oaiserve.plugins.gateway.upstream import BadAnswer, CutOff, Unreachable, Upstream, UpstreamAnswer
from oaiserve.wire.prefix_keys import Prompt

MOST_BYTES = 4 * 2**20  # limit of an answer to the gateway's own questions
ASK_SECONDS = 5.0  # time limit of such an answer
HEALTH = "/health"

_KEYS = frozenset({b"authorization", b"x-api-key", b"api-key"})  # headers with the key of a client

Header = tuple[bytes, bytes]


def without_keys(headers: Iterable[Header]) -> list[Header]:
    """Return the headers of a request without the key of its client."""
    return [header for header in headers if header[0] not in _KEYS]


@dataclass(slots=True)
class EngineRequest:
    """A request in the form that engines get."""

    method: str
    target: bytes
    headers: list[Header]
    body: bytes | bytearray
    model: str | None
    prompt: Prompt | None
    session: str | None
    has_account: bool


class ForeignEngine:
    """An engine at a URL. Its address is looked up when it is asked for the first time, and after a failure."""

    def __init__(self, url: str, number: int, key: str | None, resolve: Resolve) -> None:
        """`key` is an API key of the engine, which replaces those of clients."""
        self.url = url
        self.number = number
        self.name = str(number)  # name in metrics and in answers to clients
        self.has_key = key is not None
        self._resolve = resolve
        # People type the base URL of their client, which ends in /v1, as well as that of the engine.
        self._prefix = urlsplit(url).path.rstrip("/").removesuffix("/v1").encode()
        self._headers: list[Header] = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        self.identity = Identity()
        self.is_up = False  # It was reached and ready at the last look, and at the last request.
        self.presences = Presences()
        self.reported = Reported()
        self.num_unread = 0  # answers that could not be read
        self._upstream: Upstream | None = None

    @property
    def num_open(self) -> int:
        return len(self.presences.open)

    async def ask(self, request: EngineRequest, on_sent: Callable[[], object]) -> UpstreamAnswer:
        """Send a request, call `on_sent`, and wait for the head of the answer. Raises Unreachable and BadAnswer."""
        headers = request.headers
        if self.has_key:
            headers = [*without_keys(headers), *self._headers]
        upstream = await self._connected()
        return await upstream.ask(request.method, self._prefix + request.target, headers, request.body, on_sent)

    async def get(self, path: str) -> bytes | None:
        """Return the body of a 200, or None for another answer, or one that is no HTTP, too long or not completed.
        Raises Unreachable, also for a 503 to HEALTH: it says that an engine isn't ready, as while it loads a model."""
        upstream = await self._connected()
        with suppress(BadAnswer, CutOff):
            status, content = await upstream.get(self._prefix + path.encode(), self._headers, MOST_BYTES, ASK_SECONDS)
            if status == 200:
                return content
            if status == 503 and path == HEALTH:
                raise Unreachable("it isn't ready (503)")
        return None

    def lost(self) -> None:
        """Look up the address again before the next request, because the engine was not reached."""
        self.is_up = False
        self.reported.forget()
        self.close()

    def close(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        self._upstream = None

    async def _connected(self) -> Upstream:
        if self._upstream is None:
            found: list[Address] = []
            with suppress(OSError):
                async with asyncio.timeout(ASK_SECONDS):
                    found = [*await self._resolve(self.url)]
            if not found:
                raise Unreachable("its name has no address")
            self._upstream = Upstream(found[0], self.number)
        return self._upstream
