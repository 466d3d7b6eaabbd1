"""Makes records of requests by their stamps."""

from __future__ import annotations

from typing import Any

from oaiserve.facts.record import Outcome, RequestRecord
from oaiserve.facts.times import STAMPS, RequestTimes
from oaiserve.facts.trace import TraceContext

MS = 1_000_000


def make_record(*stamps_ms: int, request_id: str = "req-1", **fields: Any) -> RequestRecord:
    """Return a record with these stamps: those that the request reached, and then `responded`."""
    *reached, responded = (1000 * MS + at_ms * MS for at_ms in stamps_ms)
    return record_of(reached, responded, request_id=request_id, **fields)


def record_of(reached_ns: list[int], responded_ns: int, **fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "trace": TraceContext(0xABC, 0xDEF),
        "times": RequestTimes(**dict(zip(STAMPS, reached_ns, strict=False)), responded=responded_ns),
        "outcome": Outcome.FINISHED,
        "operation": "chat",
        "http_method": "POST",
        "http_route": "/v1/chat/completions",
        "http_status": 200,
        "model": "demo",
    }
    return RequestRecord(**(defaults | fields))
