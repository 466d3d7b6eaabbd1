"""The record of a step of the engine. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class StepKind(StrEnum):
    PREFILL = "prefill"  # no sequence decoded
    DECODE = "decode"  # all sequences decoded
    MIXED = "mixed"


class HostPart(StrEnum):
    """The parts of the engine thread's time, in the order of a step. The thread is always in exactly one of them."""

    IDLE = "idle"  # it has nothing to compute, and waits for a command
    COMMANDS = "commands"  # it takes new requests, aborts and deadlines
    ENCODE = "encode"  # it has a part of an image or a sound encoded
    SCHEDULE = "schedule"  # it chooses what the next step computes
    LAUNCH = "launch"  # it launches the step on the device; on a CPU, this computes the step
    MASKS = "masks"  # It computes the tokens that grammars allow next; on a GPU, during the step.
    WAIT = "wait"  # it waits for the results of a step
    PROCESS = "process"  # it turns the results into text, and ends answers
    HAND_OVER = "hand_over"  # it passes events to the event loop, and publishes its snapshot


@dataclass(slots=True)
class StepRecord:
    """One step of the engine."""

    kind: StepKind
    started_ns: int
    duration_ns: int  # time of the model, including sampling
    idle_ns: int  # time before the step in which there was work to do: work on the host, and waits for a core
    num_sequences: int
    num_tokens: int  # computed tokens
    host_ns: Mapping[HostPart, int] = field(default_factory=dict)  # host time since the previous step's results
    cost_error: float | None = None  # error of the expected time, as a share of the actual; None: no time was expected
