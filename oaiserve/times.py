"""The one clock: the stamps of a request, and the phases between them.

Stdlib only. The stages stamp `RequestTimes`; spans, histograms, headers and log lines are all derived from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import NamedTuple

__all__ = ["PHASES", "STAMPS", "Phase", "RequestTimes", "monotonic_ns"]

# The stamps in the order in which a request passes them, and the phase that begins at each one but the last.
STAMPS = (
    "received",
    "submitted",
    "tokenize_started",
    "tokenized",
    "scheduled",
    "first_token",
    "last_token",
    "responded",
)
PHASES = ("receive", "tokenize_wait", "tokenize", "queue", "prefill", "decode", "respond")


class Phase(NamedTuple):
    name: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class RequestTimes:
    """Monotonic nanoseconds, each written once, by the stage where it happens; None: not reached.

    `responded` ends every request, whatever its outcome. A request that ended early lacks the stamps after the
    phase it was in, and that phase lasts until `responded`.
    """

    received: int | None = None  # written by routes (or by the engine's caller)
    submitted: int | None = None  # written by Engine.submit
    tokenize_started: int | None = None  # written by a tokenize worker
    tokenized: int | None = None  # written by a tokenize worker
    scheduled: int | None = None  # written by the engine thread, like the next two
    first_token: int | None = None
    last_token: int | None = None
    responded: int | None = None  # written by routes (or by the engine's caller)

    def phases(self) -> list[Phase]:
        """The phases of an ended request. They touch, do not overlap, and add up to `duration_ns`, exactly."""
        if self.received is None or self.responded is None:
            raise ValueError("phases() needs a request that was received and has ended")
        starts = [self.received]
        for stamp in STAMPS[1:-1]:
            at_ns = getattr(self, stamp)
            if at_ns is None:
                break
            starts.append(at_ns)
        return [Phase(*row) for row in zip(PHASES, starts, [*starts[1:], self.responded], strict=False)]

    def ended(self, clock_ns: Callable[[], int] = monotonic_ns) -> RequestTimes:
        """A copy that ends now. A copy, and made first, because a worker that was encoding when the client left goes on
        to stamp the original."""
        copy = replace(self)
        copy.responded = clock_ns()
        return copy

    @property
    def duration_ns(self) -> int:
        if self.received is None or self.responded is None:
            raise ValueError("duration_ns needs a request that was received and has ended")
        return self.responded - self.received

    @property
    def time_to_first_token_ns(self) -> int | None:
        """TTFT = receive + tokenize_wait + tokenize + queue + prefill."""
        if self.received is None or self.first_token is None:
            return None
        return self.first_token - self.received

    def time_per_output_token_ns(self, num_tokens: int) -> float | None:
        """TPOT = decode / max(1, n - 1), for a request whose last token is known."""
        if self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / max(1, num_tokens - 1)
