"""The engine thread's time, cut into parts that touch. Engine thread only; no torch.

Where somebody watches with a profiler, each part is also a range of that profiler, named after the step it is about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from oaiserve.engine.step import Step
from oaiserve.record import HostPart, StepKind

log = logging.getLogger(__name__)


class Ranges(Protocol):
    """A profiler that shows named ranges of time on the thread that calls it. They do not nest."""

    def begin(self, name: str) -> None:
        """Ends the one before, if there is any."""

    def end(self) -> None:
        """Ends the one that is open, if there is any."""


class HostTime:
    """`enter` is the one stamp between two parts, so they add up to the time since this was made."""

    def __init__(self, clock_ns: Callable[[], int], ranges: Ranges | None = None) -> None:
        self._clock_ns = clock_ns
        self._ranges = ranges
        self.part = HostPart.IDLE
        self.since_ns = clock_ns()
        self.spent_ns = dict.fromkeys(HostPart, 0)  # in parts that are over

    def enter(self, part: HostPart, step: Step | None = None) -> int:
        """Ends the part before. Returns when that was."""
        now_ns = self._clock_ns()
        self.spent_ns[self.part] += now_ns - self.since_ns
        self.part, self.since_ns = part, now_ns
        if self._ranges is not None:
            self._show(self._ranges, part, step)
        return now_ns

    def show(self, ranges: Ranges | None) -> Ranges | None:
        """From now on parts are shown there. Returns where they were before; what is open there is ended."""
        before, self._ranges = self._ranges, ranges
        if before is not None:
            before.end()
        return before

    def _show(self, ranges: Ranges, part: HostPart, step: Step | None) -> None:
        try:
            ranges.begin(part if step is None else f"{part} {describe(step)}")
        except Exception:  # a profiler that fails costs its own ranges and nothing else
            log.exception("The profiler takes no ranges any more")
            self._ranges = None


def kind_of(step: Step, num_tokens: int) -> StepKind:
    """`num_tokens`: those of the step."""
    if num_tokens == len(step.chunks):
        return StepKind.DECODE
    return StepKind.MIXED if step.chunks[0].num_tokens == 1 else StepKind.PREFILL


def describe(step: Step) -> str:
    """For people: kind and sizes."""
    num_sequences, num_tokens = len(step.chunks), step.num_tokens
    kind = kind_of(step, num_tokens)
    return f"{kind}, {num_sequences} sequence{'s' * (num_sequences != 1)}, {num_tokens} token{'s' * (num_tokens != 1)}"
