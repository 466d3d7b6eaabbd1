"""Build samples for the tests, with times in milliseconds on a clock that starts at one second."""

from collections.abc import Sequence
from typing import Any

from loadtest.sample import Sample

START_NS = 1_000_000_000


def ns(ms: float) -> int:
    return START_NS + round(ms * 1e6)


def sample(events_ms: Sequence[float], *, at: float = 0.0, lag: float = 0.0, **fields: Any) -> Sample:
    """Return the sample of a request that was due at `at` and sent `lag` later. Its outputs arrived `events_ms` after
    `at`."""
    fields.setdefault("completion_tokens", len(events_ms))
    fields.setdefault("end_ns", ns(at + (events_ms[-1] if events_ms else 0)))
    sent_ns = ns(at + lag)
    event_ns = [ns(at + ms) for ms in events_ms]
    return Sample(0, ns(at), sent_ns=sent_ns, headers_ns=sent_ns, event_ns=event_ns, status=200, **fields)
