"""`TraceContext` is the identity of a request in a distributed trace, parsed from the W3C header `traceparent`.

The ids exist from the start of a request, long before its spans are made, so that headers, log lines, exemplars and
spans all name the same trace. This module needs only the standard library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import getrandbits

# https://www.w3.org/TR/trace-context/#traceparent-header; versions above 00 may append fields.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The ids of a request's trace and spans.

    `span_id` is the id of the server span. `parent_span_id` is the client's span, or None if the server starts the
    trace.
    """

    trace_id: int
    span_id: int
    parent_span_id: int | None = None
    parent_sampled: bool = False  # the client's flag, meaningless without a parent
    tracestate: str | None = None

    @classmethod
    def from_headers(cls, traceparent: str | None, tracestate: str | None) -> TraceContext:
        """Continue the client's trace. A missing or invalid header starts a new trace, and is never an error."""
        span_id = getrandbits(64) or 1
        if traceparent:
            match = _TRACEPARENT.fullmatch(traceparent.strip())
        else:
            match = None
        if match is not None:
            version, trace_id, parent_id, flags, more = match.groups()
            ids_are_valid = int(trace_id, 16) != 0 and int(parent_id, 16) != 0
            if version != "ff" and not (version == "00" and more) and ids_are_valid:
                return cls(int(trace_id, 16), span_id, int(parent_id, 16), bool(int(flags, 16) & 1), tracestate)
        return cls(getrandbits(128) or 1, span_id)

    def traceparent(self, span_id: int, *, is_sampled: bool) -> str:
        """Return the header for a request to another server, with this span as its parent."""
        return f"00-{self.trace_id:032x}-{span_id:016x}-{is_sampled:02x}"

    @property
    def trace_id_hex(self) -> str:
        return f"{self.trace_id:032x}"

    @property
    def span_id_hex(self) -> str:
        return f"{self.span_id:016x}"


@dataclass(slots=True)
class Attempt:
    """An attempt of a gateway to get an answer from a server."""

    started_ns: int
    attributes: dict[str, str | int]
    ended_ns: int | None = None
    error: str = ""  # why the answer is missing or incomplete
    span_id: int = field(default_factory=lambda: getrandbits(64) or 1)

    def end(self, now_ns: int, error: str = "") -> None:
        self.ended_ns = now_ns
        self.error = error
