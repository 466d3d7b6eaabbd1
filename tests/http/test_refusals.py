"""Tests of how long refusals are held back, on a clock of their own."""

import heapq
import sys

import pytest

from oaiserve.http.refusals import FREE_NS, MOST_CLIENTS, MOST_DELAY_NS, REFUSAL_NS, SHARE, Refusals

MS = 1_000_000
CLIENT = b"client"


class Clock:
    now_ns = 1_000_000 * MS

    def __call__(self) -> int:
        return self.now_ns


def test_an_occasional_mistake_is_answered_at_once() -> None:
    clock = Clock()
    accounts = Refusals(clock)
    assert [accounts.charge(CLIENT) for _ in range(FREE_NS // REFUSAL_NS)] == [0] * (FREE_NS // REFUSAL_NS)
    clock.now_ns += 1000 * MS
    for _ in range(1000):
        clock.now_ns += 20 * MS
        assert accounts.charge(CLIENT) == 0
    assert accounts.delay_ns == 0


@pytest.mark.parametrize(("at_once", "cpu_ms"), [(1, 0), (16, 0), (4, 10), (100, 0), (16, 5)])
def test_a_flood_of_refusals_takes_a_small_share_of_a_core(at_once: int, cpu_ms: int) -> None:
    """Each of the client's connections sends the next request as soon as it has the answer."""
    clock = Clock()
    seconds = 60
    accounts = Refusals(clock)
    began_ns = clock.now_ns
    cpu_ns = 0
    waiting = [began_ns] * at_once
    while waiting[0] < began_ns + seconds * 1000 * MS:
        clock.now_ns = heapq.heappop(waiting)
        cpu_ns += REFUSAL_NS + cpu_ms * MS
        heapq.heappush(waiting, clock.now_ns + accounts.charge(CLIENT, cpu_ms * MS))
    one_more_each = at_once * (REFUSAL_NS + cpu_ms * MS)
    assert cpu_ns <= SHARE * seconds * 1000 * MS + FREE_NS + one_more_each
    assert accounts.delay_ns > 0


def test_a_delay_is_never_long_and_the_account_is_soon_paid_off() -> None:
    clock = Clock()
    accounts = Refusals(clock)
    delays_ns = [accounts.charge(CLIENT, 100 * MS) for _ in range(1000)]
    assert max(delays_ns) == delays_ns[-1] == MOST_DELAY_NS
    clock.now_ns += MOST_DELAY_NS + int(REFUSAL_NS / SHARE)
    assert accounts.charge(CLIENT) == 0


def test_clients_do_not_pay_for_each_other() -> None:
    accounts = Refusals(Clock())
    for _ in range(1000):
        accounts.charge(CLIENT)
    assert accounts.charge(b"other") == 0


def test_accounts_are_few_and_forgotten_once_paid_off() -> None:
    clock = Clock()
    accounts = Refusals(clock)
    for number in range(MOST_CLIENTS + 1):
        accounts.charge(b"%d" % number, FREE_NS)
    assert accounts.charge(b"1") > 0
    assert accounts.charge(b"0") == 0, "the oldest account is forgotten"
    late = b"%d" % clock.now_ns
    free = sys.getrefcount(late)
    accounts.charge(late)
    assert sys.getrefcount(late) > free
    clock.now_ns += 1000 * MS
    accounts.charge(CLIENT)
    assert sys.getrefcount(late) == free
