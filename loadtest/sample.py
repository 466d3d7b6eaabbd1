"""What is kept of one request: stamps of the monotonic clock, and counts. Both targets fill it in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """Times in nanoseconds of the monotonic clock, which processes of one machine share; None: not reached."""

    index: int
    intended_ns: int  # when the schedule wanted it sent; in a closed loop, when its user was free
    turn: int = 0  # of a conversation; only the first is sent by the schedule
    sent_ns: int = 0  # just before it was handed to the client (the engine)
    submit_ns: int | None = None  # duration of the engine's `submit`
    headers_ns: int | None = None
    event_ns: list[int] = field(default_factory=list)  # arrival of each event with output; those of one read are equal
    event_choices: list[int] = field(default_factory=list)  # whose output it is; empty where there is but one choice
    end_ns: int = 0  # the whole answer, or the error
    status: int | None = None
    error: str | None = None  # the kind; None: it went well
    error_message: str = ""  # what the server said to it
    is_abandoned: bool = False  # the client left on purpose
    is_stream: bool = True
    num_choices: int = 1
    requested_tokens: int = 0  # of each choice
    must_fill: bool = False  # the answer has to have that many
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int | None = None  # as the server counts; None: it did not say
    trace_id: str = ""
    is_traced: bool = False  # its `traceparent` has the sampled flag
    phases_ns: dict[str, int] = field(default_factory=dict)  # as the server tells

    @property
    def is_ok(self) -> bool:
        return self.error is None and not self.is_abandoned

    @property
    def num_tokens(self) -> int:
        return len(self.event_ns) if self.completion_tokens is None else self.completion_tokens

    @property
    def streams(self) -> list[list[int]]:
        """`event_ns`, each choice by itself."""
        if not self.event_choices:
            return [self.event_ns]
        streams: dict[int, list[int]] = {}
        for choice, event_ns in zip(self.event_choices, self.event_ns, strict=True):
            streams.setdefault(choice, []).append(event_ns)
        return list(streams.values())

    @property
    def failed_phase(self) -> str:
        if self.event_ns:
            return "mid_stream"
        return "before_first_token" if self.headers_ns is not None or self.error not in CONNECT_ERRORS else "connect"

    @property
    def failure(self) -> str:
        """Kind and phase of the error."""
        return f"{self.error}, {self.failed_phase}"

    @property
    def send_lag_ns(self) -> int:
        return max(0, self.sent_ns - self.intended_ns)

    @property
    def last_ns(self) -> int:
        """The last output; events without any, such as the usage, do not count."""
        return self.event_ns[-1] if self.event_ns else self.end_ns

    @property
    def ttft_ns(self) -> int:
        """First output - intended send. Without streaming it comes with the whole answer."""
        return (self.event_ns[0] if self.event_ns else self.end_ns) - self.intended_ns

    @property
    def tpot_ns(self) -> float | None:
        """(last - first) / (n - 1); None where there is nothing between two tokens to measure. Of several choices,
        both parts of the fraction are sums: the server tells the tokens of all of them only."""
        streams = [stream for stream in self.streams if len(stream) > 1]
        if self.num_tokens < 2 or not self.is_stream or not streams:
            return None
        num_gaps = self.num_tokens - len(self.streams)
        return sum(stream[-1] - stream[0] for stream in streams) / max(1, num_gaps)

    @property
    def latency_ns(self) -> int:
        return self.last_ns - self.intended_ns


CONNECT_ERRORS = {"connect", "connect_timeout"}
