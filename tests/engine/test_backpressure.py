"""The drain rate and the deadlines, by a clock of the tests, and limits that clients share."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.backpressure import LEAST_DEADLINES, MOST_RETRY_SECONDS, Deadlines, DrainRate, Limit, SharedLimit

SECOND_NS = 1_000_000_000


def test_retry_after_is_the_time_that_the_queue_takes_to_drain() -> None:
    rate = DrainRate()
    assert rate.retry_after_seconds(100) == 1  # nothing is known yet
    for second in range(4):
        rate.observe(num_left=5 * second, num_waiting=9, now_ns=second * SECOND_NS)
    assert rate.per_second == 5
    assert [rate.retry_after_seconds(waiting) for waiting in (0, 7, 1000)] == [1, 2, MOST_RETRY_SECONDS]


def test_time_without_waiting_requests_does_not_count() -> None:
    rate = DrainRate()
    rate.observe(num_left=0, num_waiting=1, now_ns=0)
    rate.observe(num_left=10, num_waiting=1, now_ns=SECOND_NS)
    rate.observe(num_left=10, num_waiting=0, now_ns=2 * SECOND_NS)
    rate.observe(num_left=10, num_waiting=1, now_ns=100 * SECOND_NS)
    assert rate.per_second == 10


def test_the_rate_follows_changes_of_the_drain() -> None:
    rate = DrainRate()
    for second in range(30):
        rate.observe(num_left=min(second, 10) * 10 + max(0, second - 10), num_waiting=1, now_ns=second * SECOND_NS)
    assert 1 < rate.per_second < 1.1


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


# -- a client that takes all of a limit leaves the others their shares

MOST = 24
CLIENTS = "abcdefgh"
actions = st.lists(
    st.tuples(st.sampled_from(CLIENTS), st.one_of(st.integers(0, 2 * MOST), st.just("give back"))), max_size=80
)


@given(actions)
def test_a_share_is_always_to_be_had_and_the_sum_is_bounded(done: list[tuple[str, int | str]]) -> None:
    limit = SharedLimit(MOST)
    taken: dict[str, list[int]] = {client: [] for client in CLIENTS}
    largest_request = 0
    for client, action in done:
        total = sum(map(sum, taken.values()))
        assert limit.total == total
        if isinstance(action, int):
            waiting = {each: sum(numbers) for each, numbers in taken.items() if sum(numbers)}
            share = MOST // len(waiting.keys() | {client})
            without_largest = total - max(waiting.values(), default=0)
            got = limit.take(client, action)
            if not total or total + action <= MOST:
                assert got
            elif waiting.get(client, 0) + action <= share:
                assert got == (without_largest + action <= MOST)
            else:
                assert not got
            if got:
                taken[client].append(action)
                largest_request = max(largest_request, action)
        elif taken[client]:
            limit.give_back(client, taken[client].pop())
        assert limit.total <= MOST + max(MOST, largest_request)
    for client, numbers in taken.items():
        for number in numbers:
            limit.give_back(client, number)
    assert limit.total == 0


@given(st.integers(1, 200))
def test_one_client_cannot_keep_a_second_one_out(number: int) -> None:
    limit = SharedLimit(MOST)
    assert limit.take("greedy", number)
    assert all(limit.take("polite", 1) for _ in range(MOST // 2))
    assert not limit.take("greedy", MOST)
