"""Accounts of the engine thread and of requests that also mark ranges for a profiler. No torch."""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.accounts.host_time import HostTime
from oaiserve.engine.accounts.step_account import RequestNotes
from oaiserve.engine.accounts.step_causes import StepCauses
from oaiserve.engine.profiler_ranges import PhaseRanges, Ranges
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step
from oaiserve.explain.causes import RequestCauses
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.step_record import HostPart
from oaiserve.facts.times import RequestTimes

_OUTSIDE = frozenset({HostPart.IDLE, HostPart.COMMANDS})  # parts outside the loop's steps
_NAMES = {part: "collect" if part is HostPart.WAIT else str(part) for part in HostPart}


class RangedHostTime(HostTime):
    """The time of the engine thread, with a profiler range for each part except `idle`, and one around all parts of a
    step.

    With overlap, the range of a step contains the launch of one step and the results of the one before it.
    """

    def __init__(self, clock_ns: Callable[[], int], ranges: Ranges) -> None:
        super().__init__(clock_ns)
        self._ranges = ranges
        self._in_step = False

    def enter(self, part: HostPart, step: Step | None = None) -> int:
        if self.part is not HostPart.IDLE:
            self._ranges.pop()
        begins_step = part is HostPart.SCHEDULE
        if self._in_step and (begins_step or part in _OUTSIDE):
            self._in_step = False
            self._ranges.pop()
        now_ns = super().enter(part, step)
        if begins_step:
            self._in_step = True
            self._ranges.push("step")
        if part is not HostPart.IDLE:
            self._ranges.push(_NAMES[part])
        return now_ns


class RangedNotes(RequestNotes):
    """The writer of a request's stamps, which also marks the beginning of each of its phases for the profiler."""

    __slots__ = ("_phases",)

    def __init__(
        self,
        phases: PhaseRanges,
        request_id: str,
        times: RequestTimes,
        account: EngineAccount,
        steps: StepCauses | None,
        causes: RequestCauses | None,
    ) -> None:
        super().__init__(request_id, times, account, steps, causes)
        self._phases = phases

    def media_encoded(self, now_ns: int) -> None:
        super().media_encoded(now_ns)
        self._phases.enter(self.request_id, "queue")

    def admitted(self, sequence: Sequence, now_ns: int) -> bool:
        is_first = super().admitted(sequence, now_ns)
        if is_first:
            self._phases.enter(self.request_id, "prefill")
        return is_first

    def drew(self, sequence: Sequence, now_ns: int, batch: int) -> None:
        is_first = self._times.first_token is None
        super().drew(sequence, now_ns, batch)
        if is_first:
            self._phases.enter(self.request_id, "decode")
