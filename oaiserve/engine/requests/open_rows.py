"""Describes the engine's open requests for `/debug/requests` and the live page, from the moment of their submission.

Any thread may do this. It reads without a lock what the engine thread writes, so a number may be a step old."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from oaiserve.engine.loop import EngineLoop, Submitted
from oaiserve.engine.requests.open_request import OpenRequest
from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.times import RequestTimes


@dataclass(frozen=True, slots=True)
class OpenRows:
    """The rows of the open requests of a loop."""

    loop: EngineLoop
    clock_ns: Callable[[], int]

    def newest(self, most: int, epoch_offset_ns: int) -> dict[str, OpenRow]:
        """Return the rows of the newest requests by id, newest first. It may take milliseconds."""
        arriving = self.loop.arriving.copy()  # read first, because they become open requests
        open_now: dict[str, Submitted | OpenRequest] = {**self.loop.requests.all()}
        open_now |= {request_id: one for request_id, one in arriving.items() if request_id not in open_now}
        newest = dict(islice(reversed(open_now.items()), most))
        return {request_id: self._row(one, epoch_offset_ns) for request_id, one in newest.items()}

    def _row(self, one: Submitted | OpenRequest, epoch_offset_ns: int) -> OpenRow:
        origin = one.request.origin
        if isinstance(one, Submitted):
            times = RequestTimes(received=one.request.received_ns or one.at_ns, submitted=one.at_ns)
            return OpenRow.of(origin, times, self.clock_ns, epoch_offset_ns)
        return OpenRow.of(
            origin,
            one.times,
            self.clock_ns,
            epoch_offset_ns,
            prompt_tokens=one.usage.prompt_tokens,
            cached_tokens=one.usage.cached_tokens,
            computed_prompt_tokens=one.computed_prompt_tokens,
            completion_tokens=one.usage.completion_tokens,
        )
