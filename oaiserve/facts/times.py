"""`RequestTimes` holds the stamps of a request on the monotonic clock, and computes the phases between them.

The stages of the server write the stamps. Spans, histograms, headers and log lines are all derived from them. This
module needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = [
    "ALL_PHASES",
    "PASSED_PHASES",
    "PASSED_STAMPS",
    "PHASES",
    "STAMPS",
    "TEXT_PHASES",
    "TEXT_STAMPS",
    "EpochOffset",
    "Phase",
    "RequestTimes",
    "WallClock",
    "duration",
]

# The stamps in the order in which a request gets them, and the phase that begins at each stamp except the last.
STAMPS = (
    "received",
    "submitted",
    "tokenize_started",
    "tokenized",
    "media_encoded",
    "scheduled",
    "first_token",
    "last_token",
    "responded",
)
PHASES = ("receive", "tokenize_wait", "tokenize", "encode_media", "queue", "prefill", "decode", "respond")
# The same for a request without images and sounds.
TEXT_STAMPS = tuple(stamp for stamp in STAMPS if stamp != "media_encoded")
TEXT_PHASES = tuple(phase for phase in PHASES if phase != "encode_media")
# The same for a request that a gateway passes to a foreign engine, which the gateway sees only from outside.
PASSED_STAMPS = ("received", "submitted", "connecting", "sent", "first_byte", "last_token", "responded")
PASSED_PHASES = ("receive", "wait", "connect", "first_byte", "stream", "respond")
ALL_PHASES = tuple(dict.fromkeys((*PHASES[:-1], *PASSED_PHASES[1:])))  # in an order that suits both kinds


def duration(ns: float) -> str:
    """Return a time for people, with three significant digits: 0.4 µs, 24.3 ms, 1.31 s or 16.7 min.

    Logs, explanations and the terminal use this format. Pages use the same function in show.js.
    """
    if not ns:
        return "0"
    for unit, size in (("µs", 1e3), ("ms", 1e6), ("s", 1e9), ("min", 60e9)):
        if ns < 999.5 * size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns / size:.0f} {unit}"


# Returns the wall clock minus the monotonic clock, which turns a recent stamp into Unix time.
EpochOffset = Callable[[], int]


class WallClock:
    """Measures the wall clock minus the monotonic clock. The difference changes when the wall clock is set, or after
    the machine was asleep. Smaller changes are only delays between the two readings, and are ignored."""

    LEAST_STEP_NS = 10_000_000

    def __init__(self, unix_ns: Callable[[], int], clock_ns: Callable[[], int]) -> None:
        self._unix_ns = unix_ns
        self._clock_ns = clock_ns
        self._offset_ns = unix_ns() - clock_ns()

    def __call__(self) -> int:
        offset_ns = self._unix_ns() - self._clock_ns()
        if abs(offset_ns - self._offset_ns) >= self.LEAST_STEP_NS:
            self._offset_ns = offset_ns
        return self._offset_ns


class Phase(NamedTuple):
    """The time between two consecutive stamps of a request."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class RequestTimes:
    """The stamps of one request, in nanoseconds of the monotonic clock. A stamp that was not reached is None.

    Each stamp is written once, by the stage that it belongs to.

    `responded` ends every request, whatever its outcome. A request that ended early lacks the stamps after its last
    phase, and that phase lasts until `responded`.
    """

    received: int | None = None  # written by routes (or by the engine's caller)
    submitted: int | None = None  # written by Engine.submit
    tokenize_started: int | None = None  # written by a tokenize worker
    tokenized: int | None = None  # written by a tokenize worker
    # Written by the engine thread, like the next three; only for requests with images or sounds.
    media_encoded: int | None = None
    scheduled: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    responded: int | None = None  # written by routes (or by the engine's caller)
    has_media: bool = False  # written with `tokenized`: the request has the phase `encode_media`

    def phases(self) -> list[Phase]:
        """Return the phases of an ended request, which are contiguous and add up to `duration_ns` exactly."""
        if self.received is None or self.responded is None:
            raise ValueError("phases() needs a request that was received and has ended")
        stamps, phases = self.stamps_and_phases()
        starts = [self.received]
        for stamp in stamps[1:-1]:
            at_ns = getattr(self, stamp)
            if at_ns is None:
                break
            starts.append(at_ns)
        return [Phase(*row) for row in zip(phases, starts, [*starts[1:], self.responded], strict=False)]

    def stamps_and_phases(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the request's stamps in order, and the phase that begins at each of them except the
        last."""
        return (STAMPS, PHASES) if self.has_media else (TEXT_STAMPS, TEXT_PHASES)

    def so_far(self, clock_ns: Callable[[], int]) -> list[Phase]:
        """Return the phases of an open request up to now. Another thread may still write stamps."""
        return replace(self).ended(clock_ns).phases()

    def ended(self, clock_ns: Callable[[], int]) -> RequestTimes:
        """Return a copy in which `responded` is now."""
        return replace(self, responded=clock_ns())

    @property
    def duration_ns(self) -> int:
        if self.received is None or self.responded is None:
            raise ValueError("duration_ns needs a request that was received and has ended")
        return self.responded - self.received

    @property
    def time_to_first_token_ns(self) -> int | None:
        """Return the time to first token (TTFT): all phases up to and including `prefill`."""
        if self.received is None or self.first_token is None:
            return None
        return self.first_token - self.received

    def time_per_output_token_ns(self, num_tokens: int) -> float | None:
        """Return the time per output token (TPOT) = decode / max(1, num_tokens - 1), or None without a last token."""
        if self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / max(1, num_tokens - 1)
