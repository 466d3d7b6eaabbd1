"""The feed of the gateway's live page: the charts of all replicas together, and the state of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from oaiserve import __version__
from oaiserve.plugins.gateway.samples import FleetSamples
from oaiserve.plugins.shared.feed import LAST_SAMPLES, Feed
from oaiserve.routes.answer import sse


class FleetFeed(Feed):
    """Sends each message to all viewers, as the feed of a server does. `state` returns the state of the fleet for the
    page, and `is_draining` whether the gateway is shutting down, which doesn't wait for viewers."""

    def __init__(
        self,
        samples: FleetSamples,
        state: Callable[[], dict[str, Any]],
        is_draining: Callable[[], bool],
        unix_ns: Callable[[], int],
    ) -> None:
        super().__init__(self._update)
        self._samples = samples
        self._state = state
        self._is_draining = is_draining
        self._unix_ns = unix_ns

    async def events(self) -> AsyncIterator[bytes]:
        await self._look()
        found = {
            "version": __version__,
            "boundaries_seconds": self._samples.boundaries_seconds,
            "samples": [*self._samples.samples],
            "fleet": self._state(),
        }
        yield sse.event(msgspec.json.encode(found), "hello")
        while not self._is_draining():
            yield await self.next()

    async def _message(self) -> bytes:
        await self._look()
        return self._update()

    async def _look(self) -> None:
        await self._samples.look(self._unix_ns() // 1_000_000)

    def _update(self) -> bytes:
        found = {"samples": [*self._samples.samples][-LAST_SAMPLES:], "fleet": self._state()}
        return sse.event(msgspec.json.encode(found), "update")
