from collections.abc import Callable
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


def test_a_client_that_is_on_time_and_not_busy_is_valid() -> None:
    assert judge(GOOD, [i / 100 for i in range(20)]) == {"verdict": "valid", "reasons": [], "notes": []}


@pytest.mark.parametrize(
    ("judged", "values"),
    [
        (lambda late: judge([sample([100], at=10 * i, lag=6 if i < late else 4) for i in range(20)]), (0, 1, 3)),
        (lambda cpu: judge(GOOD, cpu_ns=int(cpu * 1e9)), (0.5, 0.8, 0.97)),
        # It is judged in proportion to the measured times: TPOT is 20 ms.
        (lambda lag_ms: judge(GOOD, loop_lag_ns=[int(lag_ms * 1e6)] * 9), (4, 6, 21)),
        (lambda per_second: judge(GOOD, [i / per_second for i in range(20)]), (100, 110, 120)),
    ],
    ids=["late sends", "a busy process", "event loop lag", "a rate below the schedule"],
)
def test_a_client_is_suspect_and_then_invalid(judged: Callable[[float], dict[str, Any]], values: list[float]) -> None:
    assert [judged(value)["verdict"] for value in values] == ["valid", "suspect", "invalid"]


def test_delays_that_are_usual_on_shared_cores_are_notes() -> None:
    metrics = measure(GOOD)
    facts = client_facts(GOOD, None, None)
    judged = {}
    for lag_ms in (4, 6, 21, 81):
        processes = [ProcessHealth(wall_ns=10**9, cpu_ns=10**8, loop_lag_ns=[lag_ms * 10**6] * 9).summary()]
        judged[lag_ms] = verdict(metrics, facts, processes, shares_cores=True)
    assert [result["verdict"] for result in judged.values()] == ["valid", "valid", "suspect", "invalid"]
    assert [len(result["notes"]) for result in judged.values()] == [0, 1, 0, 0]
    for said in (judged[6]["notes"][0], judged[21]["reasons"][0]):
        assert said.endswith("; this is usual if client and server share cores")


def test_late_sends_by_max_in_flight_do_not_make_the_client_invalid() -> None:
    samples = [sample([100], at=10 * i, lag=50) for i in range(20)]
    metrics = measure(samples)
    facts = client_facts(samples, [i / 1000 for i in range(20)], None)
    assert verdict(metrics, facts, [])["verdict"] == "invalid"


def test_a_send_lag_under_a_millisecond_never_counts_as_late() -> None:
    assert judge([sample([5], lag=0.9)])["verdict"] == "valid"


def test_a_load_near_the_ceiling_of_the_client_is_suspect_and_then_invalid() -> None:
    facts = client_facts(GOOD, None, CEILING)
    seconds = 0.330  # from the first send to the last end
    assert facts["load_of_ceiling"] == pytest.approx(60 / seconds / 1000 + 20 / seconds / 100)
    assert judge(GOOD, None, CEILING)["verdict"] == "suspect"
    assert judge(GOOD, None, {name: value / 2 for name, value in CEILING.items()})["verdict"] == "invalid"


def test_missing_usage_bunched_events_and_wrong_lengths_are_reasons_for_doubt() -> None:
    assert judge([sample([100], error="connect")])["reasons"] == ["no request succeeded"]
    assert "events were counted as tokens" in judge([sample([100, 110], completion_tokens=None)])["reasons"][0]
    assert "in bunches" in judge([sample([100, 100, 100, 100, 200, 200])])["reasons"][0]
    assert "length" in judge([sample([100], must_fill=True, requested_tokens=7)])["reasons"][0]
