"""Samples as a clock that starts at one second would stamp them; times in milliseconds after the intended send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.sample import Sample

START_NS = 1_000_000_000


def ns(ms: float) -> int:
    return START_NS + round(ms * 1e6)


def sample(events_ms: Sequence[float], *, at: float = 0.0, lag: float = 0.0, **fields: Any) -> Sample:
    """One request that was to be sent at `at`; `events_ms` after that its outputs arrive."""
    fields.setdefault("completion_tokens", len(events_ms))
    fields.setdefault("end_ns", ns(at + (events_ms[-1] if events_ms else 0)))
    return Sample(
        0,
        ns(at),
        sent_ns=ns(at + lag),
        headers_ns=ns(at + lag),
        event_ns=[ns(at + ms) for ms in events_ms],
        status=200,
        **fields,
    )
