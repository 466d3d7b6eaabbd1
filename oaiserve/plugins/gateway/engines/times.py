"""`PassedTimes`: the stamps of a request that the gateway passes to a foreign engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from oaiserve.facts.times import PASSED_PHASES, PASSED_STAMPS, RequestTimes


@dataclass(slots=True)
class PassedTimes(RequestTimes):
    """The stamps between `received` and `responded`, in this order. A request that ended early lacks the later ones.

    `submitted` is when the gateway had the whole body, and `last_token` the last byte from the engine. `first_token` is
    the first event with text, which doesn't begin a phase: an engine may send other bytes before it.
    """

    connecting: int | None = None  # The gateway began to send it to the engine that has answered, or the last one.
    sent: int | None = None  # The engine's connection was open, and the request was written.
    first_byte: int | None = None  # first byte of the answer's body, without comments

    def stamps_and_phases(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return PASSED_STAMPS, PASSED_PHASES

    def ended(self, clock_ns: Callable[[], int]) -> PassedTimes:
        """Return a copy that ends when the client had the whole answer, before its account was written, or now."""
        return replace(self, responded=self.responded or clock_ns())

    def begin_attempt(self, now_ns: int) -> None:
        """Note that the request is being sent to an engine. The time of earlier attempts counts as waiting."""
        self.connecting = now_ns
        self.sent = None
