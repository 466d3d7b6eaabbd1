"""Fixtures for telemetry: records, an account and a snapshot."""

import os
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.fact import facts_of
from oaiserve.facts.record import (
    AccessRefusal,
    EngineAccount,
    EventKind,
    Outcome,
    ReadAgain,
    RequestEvent,
    RequestRecord,
    WaitReason,
)
from oaiserve.facts.step_record import HostPart, StepKind, StepRecord
from oaiserve.telemetry import names
from oaiserve.telemetry.metrics import Metrics
from tests.records import record_of
from tests.telemetry.collector import Collector, running_collector
from tests.telemetry.pages import metrics_of

MakeRecord = Callable[..., RequestRecord]

# Odd nanoseconds, with a different length for each phase, so that a test notices a sum that is off by one.
STAMPS_NS = (1_000_000_007, 1_000_400_010, 1_000_450_021, 1_003_450_033, 1_013_450_047, 1_063_450_061, 1_463_450_079)
RESPONDED_NS = 1_463_999_999


@pytest.fixture(autouse=True)
def no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the OTEL_ variables that the shell exports to the tests."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Give a collector that the variables name."""
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield collector


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """Return a function that makes the record of a finished chat with 4 + 5 tokens, with the changes of the test.

    `num_stamps` is the number of stamps that the request reached before `responded`; 7 are all.
    """

    def make(num_stamps: int = 7, **changes: Any) -> RequestRecord:
        fields: dict[str, Any] = {
            "prompt_tokens": 4,
            "cached_tokens": 2,
            "completion_tokens": 5,
            "finish_reasons": ("stop",),
            "answer_reasons": ("stop",),
            "params": {"temperature": 0.5},
        }
        return record_of(*STAMPS_NS[:num_stamps], RESPONDED_NS, **(fields | changes))

    return make


@pytest.fixture
def account() -> EngineAccount:
    """Return an account for the default record with two choices, one of which was preempted once."""
    scheduled_ns, first_token_ns, last_token_ns = STAMPS_NS[4:]
    account = EngineAccount(
        waits_ns={WaitReason.STEP_UNDER_WAY: 14, WaitReason.BATCH_FULL: 10_000_000},
        num_preemptions=1,
        stalled_ns=50_000_000,
        first_step=100,
        num_steps=8,
        model_ns=300_000_000,
        num_step_sequences=20,
        num_step_tokens=60,
    )
    account.note(EventKind.PREFIX_CACHE_HIT, scheduled_ns, 0, tokens=2)
    account.note(EventKind.PREFILL_CHUNK, scheduled_ns + 20_000_000, 0, start=2, tokens=5)
    account.note(EventKind.PREFILL_CHUNK, first_token_ns, 0, start=7, tokens=3)
    account.note(EventKind.FIRST_TOKEN, first_token_ns, 0)
    account.note(EventKind.PREEMPTED, first_token_ns + 100_000_000, 1, tokens=9)
    account.note(EventKind.RESUMED, first_token_ns + 150_000_000, 1, cached_tokens=4, stalled_ns=50_000_000)
    account.note(EventKind.FINISHED, last_token_ns, 0, reason="stop")
    return account


@pytest.fixture
def constrained() -> EngineAccount:
    """Return an account for the default record, whose answer a grammar constrains."""
    account = EngineAccount(
        grammar_kind="json_schema",
        grammar_cache="miss",
        grammar_compile_ns=2_000_003,
        num_masked_draws=3,
        num_forced_tokens=2,
    )
    details = {"compile_ns": 2_000_003, "cache": "miss", "kind": "json_schema"}
    account.events.append(RequestEvent(EventKind.GRAMMAR_COMPILED, STAMPS_NS[2] + 2_500_001, None, details))
    return account


@pytest.fixture
def snapshot() -> EngineNumbers:
    """Return numbers of the engine that are all different from 0 and from each other."""
    return EngineNumbers(
        **{row.name: 10_000_007 * number for number, row in enumerate(facts_of(EngineNumbers), 1)}
        | {
            "adapters": {"sql": (2, 1)},
            "blocks_used": 30,
            "blocks_reusable": 25,  # free ones that the prefix cache can find
            "blocks_total": 120,
            "host_ns": {part: 1_000_000_001 * number for number, part in enumerate(HostPart)},
            "num_draft_tokens": 90,
            "num_accepted_tokens": 70,
            "drafts_by_accepted": (5, 30, 20),
            "num_waiting": 5,
            "num_deferred": 2,
        }
    )


@pytest.fixture
def full(snapshot: EngineNumbers, make_record: MakeRecord) -> Metrics:
    """Return metrics in which every family has a value."""
    steps = [StepRecord(StepKind.MIXED, 0, 5_000_000, 0, 1, 7, cost_error=0.03)]
    metrics = metrics_of(snapshot=lambda: snapshot, take_steps=lambda: [steps.pop()] if steps else [])
    account = EngineAccount(num_preemptions=1, stalled_ns=250_000_000, grammar_compile_ns=7)
    account.core_ns = 7_000_000_001
    account.machine_ns = 3_000_000_001
    account.alone_ns = 2_000_000_001
    account.kv_byte_seconds = 2.5
    account.weight_bytes = 10**9
    account.joules = 0.25
    account.price = 0.125
    account.inter_token_ns.extend([20_000_000, 30_000_001])
    events = {"event_tokens": array("q", [1, 3]), "event_gaps_ns": array("q", [50_000_001])}
    again = {"read_again_tokens": 2, "read_again_reason": ReadAgain.SYSTEM}
    metrics.observe(make_record(account=account, params={"max_tokens": 9}, **events, **again))
    metrics.observe(make_record(2, outcome=Outcome.REJECTED, error_type="Overloaded", http_status=429))
    metrics.count(names.TELEMETRY_ERRORS, "log")
    metrics.count(names.SPANS, "ended", 9)
    metrics.count(names.REFUSED_ACCESS, AccessRefusal.UNKNOWN_KEY)
    metrics.observe_event_loop_lag(0.001)
    metrics.render(None)  # a page has the render time of earlier pages only
    return metrics
