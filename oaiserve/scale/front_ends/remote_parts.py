"""A front end has these parts in place of telemetry, of the store of responses and of the count of connections.

The engine process has these parts, one of each for all front ends.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.record import AccessRefusal, RequestRecord
from oaiserve.facts.trace import TraceContext
from oaiserve.http.connections import Connections, Refusal
from oaiserve.routes.responses.store import StoreCounts
from oaiserve.scale.front_ends.calls import EngineProcess
from oaiserve.scale.front_ends.front_end import STORE, FrontEnd
from oaiserve.scale.front_ends.messages import Recorded
from oaiserve.telemetry.log_limit import LogLimit

LAGS_IN_MESSAGE = 5  # of those that the app observes ten times a second
Entry = dict[str, Any]


class RemoteTelemetry:
    """Telemetry of the engine process. It has the face of `Telemetry`, as far as the app needs it."""

    def __init__(
        self,
        process: EngineProcess,
        *,
        is_sampled: Callable[[TraceContext], bool],
        log_limit: LogLimit | None,
        boundaries_seconds: dict[str, builtins.list[float]],
    ) -> None:
        self._process = process
        self.is_sampled = is_sampled
        self._log_limit = log_limit
        self._lags: list[float] = []  # that are not sent yet
        self._told: Counter[tuple[str, ...]] = Counter()  # of the log's counts, what the engine process knows
        self.recent = self.live = RemoteReads(process, boundaries_seconds)

    def record(self, record: RequestRecord) -> None:
        self._process.tell(FrontEnd.record, Recorded.of(record))

    def count_refused_access(self, reason: AccessRefusal) -> None:
        self._process.tell(FrontEnd.access_refused, reason)

    def observe_event_loop_lag(self, seconds: float) -> None:
        """Send the lag twice a second, and what was logged meanwhile with it. So the engine process knows that this one
        has not stopped."""
        self._lags.append(seconds)
        if len(self._lags) == LAGS_IN_MESSAGE:
            self._process.tell(FrontEnd.loop_lags, self._lags)
            self._lags = []
            self._send_log_counts()

    def _send_log_counts(self, *, at_once: bool = False) -> None:
        if self._log_limit is None:
            return
        self._log_limit.tell(at_once=at_once)
        now = Counter(self._log_limit.counts())
        if more := now - self._told:
            self._told = now
            counts = [(level, result, number) for (level, result), number in more.items()]
            self._process.tell(FrontEnd.log_counts, counts)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page for /metrics and its content type. Call it in a worker thread."""
        page, content_type = self._process.ask(FrontEnd.read, "render", accept, {}).result()
        return page, content_type

    def close(self, timeout_seconds: float) -> bool:
        """Send all that is left to send. Return False if it may be lost."""
        self._send_log_counts(at_once=True)
        return self._process.link.flush(timeout_seconds)


class RemoteReads:
    """The accounts of the last requests of all front ends, and the samples of the live page. Calls block, so they are
    made in worker threads."""

    def __init__(self, process: EngineProcess, boundaries_seconds: dict[str, builtins.list[float]]) -> None:
        def read(what: str, value: str | int | None = None, /, **named: str | int | bool | None) -> Any:
            return process.ask(FrontEnd.read, what, value, named).result()

        self.boundaries_seconds = boundaries_seconds
        self.list: Callable[..., builtins.list[Entry]] = partial(read, "list")
        self.get: Callable[[str], Entry | None] = partial(read, "get")
        self.open = lambda: msgspec.convert(read("open"), dict[str, OpenRow])
        self.after: Callable[[int], builtins.list[Entry]] = partial(read, "after")
        self.costs: Callable[[], builtins.list[tuple[str, int, int, int, float]]] = partial(read, "costs")


class RemoteStore:
    """The store of responses of the engine process."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        for method in STORE:
            setattr(self, method.__name__, partial(self._ask, method))

    async def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._process.ask(method, *arguments))

    def counts(self) -> StoreCounts:
        """Return nothing: the engine process counts."""
        return StoreCounts()

    async def close(self) -> None:
        """Do nothing: the engine process closes it."""


class RemoteConnections(Connections):
    """The count of connections, which the engine process has admitted before it has passed them on."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    def admit(self, address: str) -> Refusal | None:
        return None

    def release(self, address: str) -> None:
        self._process.tell(FrontEnd.connection_ended, address)

    def count(self, refusal: Refusal) -> None:
        self._process.tell(Connections.count, refusal)
