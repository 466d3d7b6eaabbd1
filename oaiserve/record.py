"""What is told about a request once it has ended, about each step of the engine, and about some of them in depth.
Stdlib only.

The engine thread notes facts here as they happen; telemetry reads them afterwards, and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from oaiserve.times import RequestTimes
from oaiserve.trace import TraceContext

MOST_EVENTS = 64  # of a request: a prompt in a thousand chunks, or one preempted all the time, tells the first ones


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"  # the client got its whole answer
    CANCELLED = "cancelled"  # the client left, or did not read
    REJECTED = "rejected"  # answered with a 4xx, or refused because the server is full or going down
    FAILED = "failed"  # our fault


class WaitReason(StrEnum):
    """Why a tokenized request was not in a step yet."""

    STEP_UNDER_WAY = "step_under_way"  # it came while a step was computed: the engine looks between two steps
    BATCH_FULL = "batch_full"  # --max-running sequences ran
    TOKEN_BUDGET = "token_budget"  # others took all that a step may compute (--max-step-tokens, prefill limits)
    NO_BLOCKS = "no_blocks"  # the KV cache had no room for it
    BEHIND_OTHERS = "behind_others"  # the KV cache had no room for those before it
    SAME_PREFIX = "same_prefix"  # another one was computing what its prompt begins with


class EventKind(StrEnum):
    """What can happen to a request in the engine."""

    PREFIX_CACHE_HIT = "prefix_cache_hit"  # tokens
    PREFILL_CHUNK = "prefill_chunk"  # start, tokens, batch: the sequences in that step
    FIRST_TOKEN = "first_token"  # batch
    PREEMPTED = "preempted"  # tokens: what it has to compute again, unless it stays cached
    RESUMED = "resumed"  # cached_tokens, stalled_ns
    FINISHED = "finished"  # reason, batch


class RequestEvent(NamedTuple):
    """`choice` is the index of the sequence it happened to; what the details are depends on the kind."""

    kind: EventKind
    at_ns: int
    choice: int
    details: Mapping[str, int | str]


@dataclass(slots=True)
class EngineAccount:
    """What the engine thread notes about a request beside its stamps. Complete with the terminal event."""

    events: list[RequestEvent] = field(default_factory=list)
    num_events_dropped: int = 0  # beyond MOST_EVENTS
    waits_ns: dict[WaitReason, int] = field(default_factory=dict)  # parts of the phase `queue`
    inter_token_ns: array[int] = field(default_factory=lambda: array("q"))  # between tokens of a choice; all choices
    num_choices: int = 0  # that it asked for, of all its prompts
    num_preemptions: int = 0  # of its sequences
    stalled_ns: int = 0  # from being preempted to being computed again, added up over its sequences
    # Of the steps from its first to its last, others' parts included.
    first_step: int | None = None  # steps are numbered from 0
    num_steps: int = 0
    model_ns: int = 0  # so long these took; the rest is between two steps, or of one under way when it was scheduled
    num_step_sequences: int = 0  # added up over the steps, like the tokens
    num_step_tokens: int = 0

    def note(self, kind: EventKind, at_ns: int, choice: int, **details: int | str) -> None:
        if len(self.events) < MOST_EVENTS:
            self.events.append(RequestEvent(kind, at_ns, choice, details))
        else:
            self.num_events_dropped += 1


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """All that is told about a request once it has ended; telemetry reads this and nothing else."""

    request_id: str
    trace: TraceContext
    times: RequestTimes
    outcome: Outcome
    operation: str  # "chat" | "text_completion", as in the OpenTelemetry GenAI conventions
    http_method: str
    http_route: str  # the pattern, never the raw path
    http_status: int | None  # None: the client left before the status line was sent
    model: str  # the served name; never what an unknown client sent
    http_scheme: str = "http"
    server_address: str | None = None  # where this server listens, as far as it is known
    server_port: int | None = None
    response_id: str | None = None  # as in the answer's `id`
    error_type: str | None = None  # the class name of the error the request ended with
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    params: Mapping[str, str | int | float | bool] = field(default_factory=dict)  # what the client set, no prompt text
    prompt_text: str | None = None  # only where the operator asked for it, cut to the length that he allows
    account: EngineAccount = field(default_factory=EngineAccount)

    @property
    def tokens_per_choice(self) -> int:
        """The choices of a request run side by side, so its time per token is that of one of them."""
        return self.completion_tokens // max(1, self.account.num_choices)


class StepKind(StrEnum):
    PREFILL = "prefill"  # no sequence decoded
    DECODE = "decode"  # all did
    MIXED = "mixed"


class HostPart(StrEnum):
    """What the engine thread is doing, in the order of a step. The parts touch: it is always in one of them."""

    IDLE = "idle"  # there is nothing to compute, so it waits for a command
    COMMANDS = "commands"  # it takes what came in: requests, aborts, deadlines
    SCHEDULE = "schedule"  # it chooses what the next step computes
    LAUNCH = "launch"  # it hands the step to the device; where the model runs on a CPU, that computes it
    WAIT = "wait"  # for the results of a step
    PROCESS = "process"  # it turns these into text, and ends answers
    HAND_OVER = "hand_over"  # it gives events to whoever takes them, and publishes its numbers


class StepRecord(NamedTuple):
    """One step of the engine."""

    kind: StepKind
    started_ns: int
    duration_ns: int  # of the model, sampling included
    idle_ns: int  # before it, while there was work: the engine thread's own time, and waiting for a core
    num_sequences: int
    num_tokens: int
    number: int = 0  # steps are numbered from 0
    host_ns: Mapping[HostPart, int] = MappingProxyType({})  # of the engine thread, since the results of the step before
    # Where the device has a clock of its own:
    device_ns: int | None = None  # so long it was busy with this step
    device_gap_ns: int | None = None  # since the end of the step before, whether there was work or not


class Recording(Protocol):
    def save(self, path: Path) -> None:
        """As a trace for Chrome and Perfetto, compressed where the name ends in .gz. May take seconds; any thread."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profiler has seen of the engine's steps."""

    recording: Recording
    num_steps: int  # that were launched while it was made
    duration_ns: int
