"""Deadlines expire once and in order, and those of ended requests are forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.requests.time_limits import LEAST_DEADLINES, Deadlines, Limit


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(Limit))), st.integers(0, 50))
def test_deadlines_expire_once_and_in_order(limits: list[tuple[int, Limit]], now_ns: int) -> None:
    deadlines = Deadlines(lambda request_id: True)
    for at_ns, limit in limits:
        deadlines.add(at_ns, "a", limit)
    in_order = sorted((at_ns, "a", limit) for at_ns, limit in limits)
    expired = [(name, limit) for at_ns, name, limit in in_order if at_ns <= now_ns]
    assert list(deadlines.take_expired(now_ns)) == expired
    assert list(deadlines.take_expired(now_ns)) == []
    assert deadlines.next_ns == next((at_ns for at_ns, _, _ in in_order if at_ns > now_ns), None)


def test_of_many_deadlines_those_of_ended_requests_are_forgotten() -> None:
    deadlines = Deadlines(lambda request_id: request_id in ("0", "1"))
    for number in range(3 * LEAST_DEADLINES):
        deadlines.add(number, str(number), Limit.END)
    left = [name for name, _ in deadlines.take_expired(3 * LEAST_DEADLINES)]
    assert left[:2] == ["0", "1"]
    assert len(left) <= LEAST_DEADLINES
