"""Makes records of ended requests by their stamps: those that the request reached, and then `responded`."""

from typing import Any

from oaiserve.facts.record import Outcome, RequestRecord
from oaiserve.facts.times import TEXT_STAMPS, RequestTimes
from oaiserve.facts.trace import TraceContext

MS = 1_000_000


def record_at(*stamps_ms: int, **fields: Any) -> RequestRecord:
    """Return a record with these stamps, in milliseconds from one second on."""
    return record_of(*(1000 * MS + at_ms * MS for at_ms in stamps_ms), **fields)


def record_of(*stamps_ns: int, **fields: Any) -> RequestRecord:
    *reached, responded = stamps_ns
    defaults: dict[str, Any] = {
        "request_id": "req-1",
        "trace": TraceContext(0xABC, 0xDEF),
        "times": RequestTimes(**dict(zip(TEXT_STAMPS, reached, strict=False)), responded=responded),
        "outcome": Outcome.FINISHED,
        "operation": "chat",
        "http_method": "POST",
        "http_route": "/v1/chat/completions",
        "http_status": 200,
        "model": "demo",
    }
    return RequestRecord(**(defaults | fields))
