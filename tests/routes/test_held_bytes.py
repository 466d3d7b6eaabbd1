"""Tests of the bytes of bodies that one request holds of the limit for all."""

import pytest

from oaiserve.errors import APIError, Overloaded, Unavailable
from oaiserve.http.fair_turns import Task, TurnWorkers, Work
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.routes.intake.receive import HeldBytes
from oaiserve.runtime import THREADS


def test_bytes_are_given_back_however_the_request_ends() -> None:
    received = SharedLimit(100)
    with HeldBytes(received, "client") as held:
        held.take(60)
        held.take(30)
        held.give_back(50)
        assert received.total == held.number == 40
        with pytest.raises(Overloaded):
            held.take(61)
    assert received.total == 0


def test_late_work_for_a_client_that_has_left_takes_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    received = SharedLimit(100)
    with HeldBytes(received, "client") as held:
        held.take(60)

    def late() -> Work[None]:
        held.take(1)
        yield None

    failures: list[APIError] = []
    ends = {"done": pytest.fail, "failed": failures.append, "dropped": pytest.fail}
    TurnWorkers(0, "late", runtime=THREADS).add(
        Task("client", 60, late(), **ends, is_unwanted=lambda: False, name="late")
    )
    assert [type(failure) for failure in failures] == [Unavailable]
    assert received.total == 0
    assert not caplog.records
