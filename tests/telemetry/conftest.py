"""Records to feed telemetry with."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from oaiserve.times import STAMPS, Outcome, RequestRecord, RequestTimes
from oaiserve.trace import TraceContext

MakeRecord = Callable[..., RequestRecord]

# Odd nanoseconds, each phase of another length: a sum that is off by one shows.
STAMPS_NS = (1_000_000_007, 1_000_400_010, 1_000_450_021, 1_003_450_033, 1_013_450_047, 1_063_450_061, 1_463_450_079)
RESPONDED_NS = 1_463_999_999


@pytest.fixture(autouse=True)
def no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shell that runs the tests exports."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def make_record() -> MakeRecord:
    """A record as it is by default (a finished chat of 4 + 5 tokens), but for what the test names. `num_stamps`: how
    many stamps it reached before it ended; 7: all."""

    def make(num_stamps: int = 7, **changes: Any) -> RequestRecord:
        times = RequestTimes(**dict(zip(STAMPS, STAMPS_NS[:num_stamps], strict=False)), responded=RESPONDED_NS)
        fields: dict[str, Any] = {
            "request_id": "req-1",
            "trace": TraceContext(trace_id=0xABC, span_id=0xDEF),
            "times": times,
            "outcome": Outcome.FINISHED,
            "operation": "chat",
            "http_method": "POST",
            "http_route": "/v1/chat/completions",
            "http_status": 200,
            "model": "demo",
            "prompt_tokens": 4,
            "cached_tokens": 2,
            "completion_tokens": 5,
            "finish_reasons": ("stop",),
            "params": {"temperature": 0.5},
        }
        return RequestRecord(**(fields | changes))

    return make


@pytest.fixture
def snapshot() -> SimpleNamespace:
    return SimpleNamespace(
        num_running=3,
        num_waiting=2,
        num_tokenizing=1,
        blocks_used=30,
        blocks_total=120,
        num_preemptions=7,
        num_steps=99,
    )
