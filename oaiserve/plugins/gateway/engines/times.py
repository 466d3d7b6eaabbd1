"""`PassedTimes`: the stamps of a request that the gateway passes to a foreign engine."""

from __future__ import annotations

from dataclasses import dataclass

from oaiserve.facts.times import PASSED_PHASES, Phase, RequestTimes


@dataclass(slots=True)
class PassedTimes(RequestTimes):
    """The stamps between `received` and `responded`, in this order. A request that ended early lacks the later ones.

    `submitted` is when the gateway had the whole body, and `last_token` the last byte from the engine. `first_token` is
    the first event with text, which doesn't begin a phase: an engine may send other bytes before it.
    """

    connecting: int | None = None  # The gateway began to send it to the engine that has answered, or the last one.
    sent: int | None = None  # The engine's connection was open, and the request was written.
    first_byte: int | None = None  # first byte of the answer's body, without comments

    def phases(self) -> list[Phase]:
        """Return the phases of an ended request, which are contiguous and add up to `duration_ns` exactly."""
        if self.received is None or self.responded is None:
            raise ValueError("phases() needs a request that was received and has ended")
        starts = [self.received]
        for at_ns in (self.submitted, self.connecting, self.sent, self.first_byte, self.last_token):
            if at_ns is None:
                break
            starts.append(at_ns)
        return [Phase(*row) for row in zip(PASSED_PHASES, starts, [*starts[1:], self.responded], strict=False)]

    def begin_attempt(self, now_ns: int) -> None:
        """Note that the request is being sent to an engine. The time of earlier attempts counts as waiting."""
        self.connecting = now_ns
        self.sent = None
