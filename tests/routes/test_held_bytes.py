"""Tests of the bytes of bodies that one request holds of the limit for all."""

import pytest
from starlette.requests import ClientDisconnect

from oaiserve.errors import Overloaded
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.routes.intake.receive import HeldBytes


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


def test_late_work_for_a_client_that_has_left_takes_nothing() -> None:
    received = SharedLimit(100)
    with HeldBytes(received, "client") as held:
        held.take(60)
    with pytest.raises(ClientDisconnect):
        held.take(1)
    assert received.total == 0
