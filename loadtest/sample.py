"""The record of one request: stamps of the monotonic clock, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """One request. Times are nanoseconds of the monotonic clock, which all processes of a machine share; None means
    that the request did not get that far."""

    index: int
    intended_ns: int  # when the request was due by the schedule; in a closed loop, when its user was free
    turn: int = 0  # position in a conversation; only turn 0 is sent by the schedule
    sent_ns: int = 0  # just before the request was handed to the HTTP client, or to the engine; 0: never sent
    submit_ns: int | None = None  # how long `Engine.submit` took; only in process
    headers_ns: int | None = None
    event_ns: list[int] = field(default_factory=list)  # arrival of each event with output; the same for all of one read
    event_choices: list[int] = field(default_factory=list)  # the choice of each event; empty if there is only one
    first_tokens: int | None = None  # tokens in the first events of all choices, if known
    num_characters: int = 0  # characters of all events; 0 if some are unknown
    first_characters: int = 0  # characters of the first events of all choices
    end_ns: int = 0  # arrival of the whole answer, or of the error
    status: int | None = None
    error: str | None = None  # the kind of the error; None: there was none
    error_message: str = ""  # the server's own message
    is_abandoned: bool = False  # the client disconnected on purpose
    is_stream: bool = True
    is_parsed: bool = False  # has reasoning or calls, so some tokens are marks that don't appear in the output
    num_choices: int = 1
    requested_tokens: int = 0  # tokens requested for each choice
    must_fill: bool = False  # the answer must have exactly `requested_tokens` (ignore_eos)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_by: str = ""  # where the server reported `cached_tokens`: "usage" or "timings"; "": nowhere
    completion_tokens: int | None = None  # as the server counted them; None: it sent no usage
    trace_id: str = ""
    is_traced: bool = False  # whether the request's `traceparent` has the sampled flag
    phases_ns: dict[str, int] = field(default_factory=dict)  # durations that the server reported

    @property
    def is_ok(self) -> bool:
        return self.error is None and not self.is_abandoned

    @property
    def num_tokens(self) -> int:
        return len(self.event_ns) if self.completion_tokens is None else self.completion_tokens

    @property
    def streams(self) -> list[list[int]]:
        """The stamps of `event_ns`, one list for each choice."""
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
        """The kind of the error and the phase it happened in, as in "timeout, mid_stream"."""
        return f"{self.error}, {self.failed_phase}"

    @property
    def send_lag_ns(self) -> int:
        return max(0, self.sent_ns - self.intended_ns)

    @property
    def last_ns(self) -> int:
        """The stamp of the last output; events without output, such as the usage, do not count."""
        return self.event_ns[-1] if self.event_ns else self.end_ns

    @property
    def ttft_ns(self) -> int:
        """The time from the intended send to the first output. Without streaming that is the whole answer."""
        return (self.event_ns[0] if self.event_ns else self.end_ns) - self.intended_ns

    @property
    def num_first_tokens(self) -> float:
        """The tokens in the first events of all choices, which the time per token excludes. They are counted if
        possible, else estimated from their share of the text, or of the events."""
        num_later_events = len(self.event_ns) - len(self.streams)
        if self.first_tokens is not None:
            tokens: float = self.first_tokens
        elif self.num_characters:
            tokens = self.num_tokens * self.first_characters / self.num_characters
        else:
            tokens = self.num_tokens * len(self.streams) / max(1, len(self.event_ns))
        return max(len(self.streams), min(tokens, self.num_tokens - num_later_events))

    @property
    def tpot_ns(self) -> float | None:
        """The time per output token, (last - first) / (n - tokens of the first event); None if no choice has two
        events. With several choices both parts of the fraction are sums over them, because the server counts the tokens
        of all choices together."""
        streams = [stream for stream in self.streams if len(stream) > 1]
        if self.num_tokens < 2 or not self.is_stream or not streams:
            return None
        num_later_tokens = self.num_tokens - self.num_first_tokens
        return sum(stream[-1] - stream[0] for stream in streams) / max(1, num_later_tokens)

    @property
    def latency_ns(self) -> int:
        return self.last_ns - self.intended_ns


CONNECT_ERRORS = {"connect", "connect_timeout"}
