"""`OpenRow` describes an open request for `/debug/requests` and the live page: its phases and its progress. It has no
text of prompts or answers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from oaiserve.facts.record import Origin
from oaiserve.facts.times import RequestTimes

MOST_SHOWN = 20  # open requests in a list: the newest of the engine, and the newest of those outside it


class PhaseSoFar(msgspec.Struct):
    """A phase of an open request. `start_ns` counts from its receipt. The last phase has not ended."""

    name: str
    start_ns: int
    duration_ns: int


class OpenRow(msgspec.Struct, kw_only=True):
    """An open request. Numbers of tokens are 0 until they are known.

    `computed_prompt_tokens` need no further computation; they include the `cached_tokens`.
    """

    request_id: str
    received_unix_ns: int
    operation: str
    route: str
    model: str
    client: str | None
    elapsed_ns: int
    phase: str  # the last of `phases`
    phases: list[PhaseSoFar]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(
        cls,
        origin: Origin,
        times: RequestTimes,
        clock_ns: Callable[[], int],
        epoch_offset_ns: int,
        **tokens: int,
    ) -> OpenRow:
        """Return the current row. Other threads may still write into `times`, in which `received` is set.

        `epoch_offset_ns` is the wall clock minus the monotonic clock."""
        phases = times.so_far(clock_ns)
        received_ns = phases[0].start_ns
        return cls(
            request_id=origin.request_id,
            received_unix_ns=received_ns + epoch_offset_ns,
            operation=origin.operation,
            route=origin.http_route,
            model=origin.model,
            client=origin.client,
            elapsed_ns=phases[-1].end_ns - received_ns,
            phase=phases[-1].name,
            phases=[PhaseSoFar(phase.name, phase.start_ns - received_ns, phase.duration_ns) for phase in phases],
            **tokens,
        )
