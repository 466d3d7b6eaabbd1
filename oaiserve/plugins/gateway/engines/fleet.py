"""`Fleet`: the engines behind a gateway. It finds out what they are, watches whether they answer, and chooses one for
each request."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from oaiserve.plugins.gateway.engines.engine import HEALTH, ForeignEngine
from oaiserve.plugins.gateway.engines.identity import OAISERVE, identify
from oaiserve.plugins.gateway.engines.reported import sample_of
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.upstream import NoAnswer
from oaiserve.wire.prefix_keys import Prompt
from oaiserve.wire.report import ReplicaReport
from oaiserve.wire.router import NoReplica

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # interval between two looks at an engine
IDENTIFY_LOOKS = 60  # after this many looks, an engine's kind and models are determined again
MOST_IN_BACKGROUND = 2  # batch lines that engines have at a time, because engines can't tell them from other requests


class Fleet:
    """All engines. Event loop only, except for the numbers, which any thread may read.

    For plug-ins that send requests of their own, it is the capacity of a backend.
    """

    step_cost = None  # unknown for foreign engines
    capacity: Mapping[str, Any] = MappingProxyType({"max_running": MOST_IN_BACKGROUND})

    def __init__(self, engines: Sequence[ForeignEngine], clock_ns: Callable[[], int]) -> None:
        self.engines = engines
        self.is_draining = False
        self.in_background = asyncio.Semaphore(MOST_IN_BACKGROUND)
        self._clock_ns = clock_ns
        self._routers = Routers()
        self._num_reports = 0
        self._warned: set[str] = set()  # engines whose failure was logged

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and any(engine.is_up for engine in self.engines)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the models of all engines."""
        return tuple(dict.fromkeys(name for engine in self.engines for name in engine.identity.models))

    def has_others(self, client: str) -> bool:
        """Return whether clients other than this one have requests at an engine."""
        return any(presence.client != client for engine in self.engines for presence in engine.presences.open)

    def drain(self) -> None:
        """Accept no further requests. A signal handler may call this."""
        self.is_draining = True

    async def run(self) -> None:
        """Watch all engines until it is cancelled."""
        try:
            await asyncio.gather(*(self._watch(engine) for engine in self.engines))
        finally:
            for engine in self.engines:
                engine.close()

    def choose(
        self, prompt: Prompt | None, model: str | None, session: str | None, tried: Collection[str]
    ) -> ForeignEngine | None:
        """Return the engine for a request, or None if all were tried. Without a prompt, it is the least busy one."""
        left = [engine for engine in self.engines if engine.name not in tried]
        left = [engine for engine in left if engine.is_up] or left
        left = [engine for engine in left if model in engine.identity.models] or left
        if len(left) < 2:
            return left[0] if left else None
        if prompt is not None:
            out = {engine.name for engine in self.engines} - {engine.name for engine in left}
            try:
                chosen = self._routers.choose(prompt, self._clock_ns(), session, out).replica
                return next(engine for engine in left if engine.name == chosen)
            except NoReplica:
                pass
        return min(left, key=lambda engine: engine.num_open)

    def lost(self, engine: ForeignEngine, why: str) -> None:
        """Note that an engine was not reached."""
        engine.lost()
        if engine.name not in self._warned:
            self._warned.add(engine.name)
            log.warning("Engine %s at %s is away: %s", engine.name, engine.url, why)

    async def _watch(self, engine: ForeignEngine) -> None:
        number = 0
        while True:
            try:
                await self._look(engine, number)
            except NoAnswer as error:
                self.lost(engine, str(error))
                number = 0
            except Exception:  # The next look may succeed, and other engines are looked at, too.
                log.exception("Engine %s at %s cannot be looked at", engine.name, engine.url)
                number = 0
            else:
                number += 1
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, engine: ForeignEngine, number: int) -> None:
        """Check whether an engine responds, and now and then of what kind it is. Raises NoAnswer."""
        before = engine.identity
        if not engine.is_up or not before.has_metrics:
            await engine.get(HEALTH)
        if number % IDENTIFY_LOOKS == 0 or not before.models:
            engine.identity = await identify(engine.get)
        if engine.identity.has_metrics and (content := await engine.get("/metrics")) is not None:
            engine.reported.add(sample_of(content, self._clock_ns()))
        if not engine.is_up or engine.identity != before:
            self._report(engine)
        engine.is_up = True
        self._warned.discard(engine.name)
        if len(self.engines) > 1:
            self._learn(engine)

    def _report(self, engine: ForeignEngine) -> None:
        log.info("Engine %s at %s is %s", engine.name, engine.url, engine.identity.shown)
        if engine.identity.kind == OAISERVE:
            log.warning("Engine %s is oaiserve, which explains more with: --replica %s", engine.name, engine.url)

    def _learn(self, engine: ForeignEngine) -> None:
        now_ns = self._clock_ns()
        self._num_reports += 1
        self._routers.update_replicas([engine.name for engine in self.engines], now_ns)
        models = engine.identity.models
        report = ReplicaReport(engine.name, "", self._num_reports, engine.num_open, 0.0, array("Q"), models=models)
        self._routers.learn(report, now_ns)
