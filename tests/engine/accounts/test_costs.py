"""The cost of a request that runs with others, and its cost alone."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from oaiserve.facts.record import EngineAccount
from oaiserve.wire.continuation import Piece
from tests.engine.accounts.lab import Lab
from tests.engine.doubles import request


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    lab = Lab(cost_per_hour=36)
    with lab.engine:
        lab.learn()
        yield lab


def beside(lab: Lab, number: int, prompt_len: int, **params: int) -> EngineAccount:
    """Return the account of the same request, which begins next to others."""
    others = [request(f"{i}", prompt_len=prompt_len, max_tokens=200) for i in range(number)]
    own = request("same", prompt_len=300, **{"max_tokens": 40, **params})
    return lab.run(*others, own, after=3 if number else 0)["same"].account


@pytest.mark.parametrize("params", [{}, {"n": 4}, {"max_tokens": 1}])
def test_the_cost_alone_is_the_same_in_any_company_and_is_that_of_a_request_that_was_alone(
    lab: Lab, params: dict[str, int]
) -> None:
    alone = beside(lab, 0, 1, **params)
    assert alone.alone_ns == pytest.approx(alone.machine_ns, rel=0.05)
    for number, prompt_len in ((1, 30), (3, 600), (8, 4), (15, 30)):
        account = beside(lab, number, prompt_len, **params)
        assert account.alone_ns == pytest.approx(alone.alone_ns, rel=0.05)
        assert account.alone_core_ns == pytest.approx(alone.core_ns, rel=0.05)
        assert account.price == pytest.approx(account.machine_ns / 1e11)


def test_the_cost_alone_of_a_continued_stream_is_that_of_the_rest(lab: Lab) -> None:
    sent = (Piece(0, [70 + number for number in range(30)]),)
    account = lab.run(replace(request("rest", prompt_len=300, max_tokens=40), sent=sent))["rest"].account
    assert account.alone_ns == pytest.approx(account.machine_ns, rel=0.05)


def test_a_request_costs_less_beside_others_that_read_the_weights_with_it(lab: Lab) -> None:
    costs = [beside(lab, number, 4).machine_ns for number in (0, 1, 3, 7)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0] / 2
