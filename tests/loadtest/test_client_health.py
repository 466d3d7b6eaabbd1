from __future__ import annotations

from typing import Any

import pytest

from loadtest.client_health import ProcessHealth, client_facts, verdict
from loadtest.measure import measure
from loadtest.sample import Sample
from tests.loadtest.samples import sample

CEILING = {"events_per_second": 1000.0, "requests_per_second": 100.0}


def judge(
    samples: list[Sample], offsets: list[float] | None = None, ceiling: dict[str, float] | None = None, **health: Any
) -> dict[str, Any]:
    fields = {"wall_ns": 10**9, "cpu_ns": 10**8, "loop_lag_ns": [10**5]} | health
    processes = [ProcessHealth(**fields).summary()]
    return verdict(measure(samples), client_facts(samples, offsets, ceiling), processes)


GOOD = [sample([100, 120, 140], at=10 * i) for i in range(20)]


def test_a_client_that_was_on_time_and_had_time_is_valid() -> None:
    assert judge(GOOD, [i / 100 for i in range(20)]) == {"verdict": "valid", "reasons": []}


@pytest.mark.parametrize(("num_late", "expected"), [(0, "valid"), (1, "suspect"), (3, "invalid")])
def test_requests_sent_late_make_it_suspect_and_then_invalid(num_late: int, expected: str) -> None:
    samples = [sample([100], at=10 * i, lag=6 if i < num_late else 4) for i in range(20)]
    assert judge(samples)["verdict"] == expected


def test_a_client_that_was_told_to_hold_back_is_not_blamed_for_it() -> None:
    samples = [sample([100], at=10 * i, lag=50) for i in range(20)]
    metrics, facts = measure(samples), client_facts(samples, [i / 1000 for i in range(20)], None)
    assert verdict(metrics, facts, [])["verdict"] == "invalid"
    assert verdict(metrics, facts, [], holds_back=True)["verdict"] == "valid"


def test_a_lag_under_a_millisecond_is_never_late() -> None:
    assert judge([sample([5], lag=0.9)])["verdict"] == "valid"


@pytest.mark.parametrize(("cpu", "expected"), [(0.5, "valid"), (0.8, "suspect"), (0.97, "invalid")])
def test_a_busy_process_is_no_good_witness(cpu: float, expected: str) -> None:
    assert judge(GOOD, cpu_ns=int(cpu * 1e9))["verdict"] == expected


def test_an_engine_in_the_same_process_may_be_busy() -> None:
    assert judge(GOOD, cpu_ns=2 * 10**9, loop_lag_ns=[])["verdict"] == "valid"


@pytest.mark.parametrize(("lag_ms", "expected"), [(4, "valid"), (6, "suspect"), (21, "invalid")])
def test_a_late_event_loop_counts_by_what_is_measured(lag_ms: float, expected: str) -> None:
    assert judge(GOOD, loop_lag_ns=[int(lag_ms * 1e6)] * 9)["verdict"] == expected  # TPOT is 20 ms


@pytest.mark.parametrize(("per_second", "expected"), [(100, "valid"), (110, "suspect"), (120, "invalid")])
def test_a_rate_that_was_not_reached(per_second: float, expected: str) -> None:
    judged = judge(GOOD, [i / per_second for i in range(20)])
    assert judged["verdict"] == expected


def test_a_run_near_the_ceiling_of_the_client() -> None:
    facts = client_facts(GOOD, None, CEILING)
    seconds = 0.330  # from the first send to the last end
    assert facts["load_of_ceiling"] == pytest.approx(60 / seconds / 1000 + 20 / seconds / 100)
    assert judge(GOOD, None, CEILING)["verdict"] == "suspect"
    assert judge(GOOD, None, {name: value / 2 for name, value in CEILING.items()})["verdict"] == "invalid"


def test_other_doubts() -> None:
    assert judge([sample([100], error="connect")])["reasons"] == ["no request succeeded"]
    assert "events were counted as tokens" in judge([sample([100, 110], completion_tokens=None)])["reasons"][0]
    assert "in bunches" in judge([sample([100, 100, 100, 100, 200, 200])])["reasons"][0]
    assert "length" in judge([sample([100], must_fill=True, requested_tokens=7)])["reasons"][0]
