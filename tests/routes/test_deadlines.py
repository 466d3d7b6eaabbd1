"""Tests the deadlines of requests: where they are read, what is refused, and what the record says of them."""

from typing import Any

import httpx
import pytest

from oaiserve.errors import DeadlineMissed, InternalError, RequestTimeout
from oaiserve.facts.record import DeadlineOutcome, Outcome
from tests.routes.asking import BODIES, refused
from tests.routes.doubles import fails, says
from tests.serving import Served


def ask(
    served: Served, path: str = "/v1/completions", headers: dict[str, Any] | None = None, **body: object
) -> httpx.Response:
    with served.client() as client:
        return client.post(path, json=BODIES[path] | body, headers=headers)


@pytest.mark.parametrize("path", BODIES)
def test_the_earlier_one_of_header_and_body_counts_from_the_receipt(served: Served, path: str) -> None:
    headers = {"x-deadline-ms": "90000", "x-ttft-deadline-ms": "50000"}
    assert ask(served, path, headers, deadline_ms=80_000, ttft_deadline_ms=60_000.0).status_code == 200
    request = served.engine.submitted.get()
    record = served.telemetry.next_record()
    assert (request.deadline_ns - request.received_ns, record.deadline_ns) == (80 * 10**9, 80 * 10**9)
    assert (request.first_token_deadline_ns - request.received_ns, record.ttft_deadline_ns) == (50 * 10**9, 50 * 10**9)
    assert (record.times.received, record.deadline) == (request.received_ns, DeadlineOutcome.MET)


def test_without_a_deadline_there_is_none(served: Served) -> None:
    assert ask(served).status_code == 200
    request = served.engine.submitted.get()
    record = served.telemetry.next_record()
    assert (request.deadline_ns, request.first_token_deadline_ns, record.deadline) == (None, None, None)


@pytest.mark.parametrize("text", ["0", "-1", "", "1.5", "soon", "86400001", "9" * 5000, "²"])
def test_a_header_that_is_no_number_of_milliseconds_is_refused(served: Served, text: str) -> None:
    response = ask(served, headers={"x-deadline-ms": text.encode("latin-1")})
    refused(response, "x-deadline-ms", "must be an integer of milliseconds from 1 to 86400000")


@pytest.mark.parametrize("value", [0, -5, 1.5, 86_400_001])
def test_a_field_outside_of_its_range_is_refused(served: Served, value: float) -> None:
    refused(ask(served, deadline_ms=value), "deadline_ms")


@pytest.mark.parametrize(
    ("script", "body", "outcome", "deadline"),
    [
        (says("Hi"), {"ttft_deadline_ms": 60_000}, Outcome.FINISHED, DeadlineOutcome.MET),
        (fails(DeadlineMissed("Late.")), {"deadline_ms": 60_000}, Outcome.REJECTED, DeadlineOutcome.MISSED),
        (
            fails(DeadlineMissed("Late."), "H"),
            {"deadline_ms": 60_000, "stream": True},
            Outcome.REJECTED,
            DeadlineOutcome.MISSED,
        ),
        (fails(InternalError("Broken.")), {"deadline_ms": 60_000}, Outcome.FAILED, DeadlineOutcome.MISSED),
    ],
)
def test_the_record_says_whether_it_was_met(
    served: Served, script: Any, body: dict[str, object], outcome: Outcome, deadline: DeadlineOutcome
) -> None:
    served.engine.script = script
    response = ask(served, **body)
    record = served.telemetry.next_record()
    assert (record.outcome, record.deadline) == (outcome, deadline)
    if record.error_type == "DeadlineMissed" and "stream" not in body:
        refused(response, None, "Late.", status=408, code="deadline_missed")
        assert response.headers["x-should-retry"] == "false"


def test_a_stream_that_exceeds_the_limit_of_the_server_is_rejected_like_other_answers(served: Served) -> None:
    for stream in (False, True):
        served.engine.script = fails(RequestTimeout("Too long."), "H")
        ask(served, stream=stream)
        assert served.telemetry.next_record().outcome == Outcome.REJECTED


def test_an_answer_that_comes_too_late_has_missed(served: Served) -> None:
    assert ask(served, deadline_ms=1).status_code == 200  # the double keeps no deadlines
    record = served.telemetry.next_record()
    assert (record.deadline is DeadlineOutcome.MET) == (record.times.duration_ns <= 10**6)
