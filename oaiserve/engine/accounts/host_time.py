"""The time of the engine thread, divided into contiguous parts. Engine thread only, no torch."""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.sequences.step import Step
from oaiserve.engine.sequences.step_load import load_of
from oaiserve.explain.step_cost import Load
from oaiserve.facts.step_record import HostPart, StepKind


class HostTime:
    """The time of the engine thread in each part of its work.

    `enter` reads the clock once between two parts, so the parts add up to the time since this object was made.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self.part = HostPart.IDLE
        self.step: Step | None = None  # the step that the part works on; read by the watchdog
        self.since_ns = clock_ns()
        self.spent_ns = dict.fromkeys(HostPart, 0)  # in parts that are over

    def enter(self, part: HostPart, step: Step | None = None) -> int:
        """End the current part, begin another one, and return the time between the two."""
        now_ns = self._clock_ns()
        self.spent_ns[self.part] += now_ns - self.since_ns
        self.part = part
        self.step = step
        self.since_ns = now_ns
        return now_ns


def kind_of(step: Step, load: Load) -> StepKind:
    if not load.decodes or step.chunks[0].sequence.is_whole:
        return StepKind.PREFILL
    if load.prompt_tokens:
        return StepKind.MIXED
    return StepKind.DECODE


def describe(step: Step) -> str:
    load = load_of(step)
    num_sequences = len(step.chunks)
    num_tokens = load.num_tokens
    kind = kind_of(step, load)
    return f"{kind}, {num_sequences} sequence{'s' * (num_sequences != 1)}, {num_tokens} token{'s' * (num_tokens != 1)}"
