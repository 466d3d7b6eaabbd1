"""The rate at which the queue drains, by a clock of the tests."""

from oaiserve.engine.requests.drain_rate import MOST_RETRY_SECONDS, DrainRate

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
