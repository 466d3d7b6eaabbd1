"""What each client's requests got, waited for, and made others wait for, in windows of time."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.record import FURTHER_CLIENTS, EngineAccount, OthersTime, Outcome, RequestRecord, Whose
from oaiserve.telemetry.clients import MOST_CLIENTS, PIECE_SECONDS, WINDOW_SECONDS, ClientRow, Clients
from tests.records import MS, record_at

SECOND_NS = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 7 * WINDOW_SECONDS * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns


def ended(client: str | None, machine_ms: int = 1, **others_ms: int) -> RequestRecord:
    """Return a request of a client that has waited for the prompts of others."""
    others = [OthersTime(Whose.OTHER_CLIENT, name or None, ms * MS, 0, 0) for name, ms in others_ms.items()]
    account = EngineAccount(machine_ns=machine_ms * MS, kv_byte_seconds=2.5, others_ns={"queue": others})
    counts = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 3}
    return record_at(0, 0, 0, 0, 0, 10, 20, 30, client=client, account=account, **counts)


def test_who_made_others_wait_the_longest_comes_first() -> None:
    clients = Clients(Clock())
    clients.add(ended("alice", 5, batchjob=700, carol=40))
    clients.add(ended("carol", 9, batchjob=100))
    clients.add(ended("batchjob", 800))
    clients.add(ended(None, 3))
    found = clients.last(60).clients
    assert [row.client for row in found] == ["batchjob", "carol", "alice", ""]
    assert found[0] == ClientRow("batchjob", 1, 9, 4, 3, 800 * MS, 2.5, 0, 800 * MS)
    assert (found[1].waited_ns, found[1].delayed_ns) == (100 * MS, 40 * MS)


def test_a_client_with_many_requests_does_not_wait_longer_for_a_single_one() -> None:
    clients = Clients(Clock())
    clients.add(ended("alice", batchjob=500))
    for _ in range(6):  # They have all waited for the same step.
        record = ended("batchjob", alice=90)
        clients.add(replace(record, account=replace(record.account, client_requests=6)))
    found = {row.client: row for row in clients.last(60).clients}
    assert [*found] == ["batchjob", "alice"]
    assert (found["alice"].delayed_ns, found["batchjob"].delayed_ns) == (90 * MS, 500 * MS)
    assert (found["alice"].waited_ns, found["batchjob"].waited_ns) == (500 * MS, 90 * MS)


def test_rejected_requests_are_counted_apart() -> None:
    clients = Clients(Clock())
    clients.add(ended("alice", 5))
    clients.add(replace(ended("alice", 0), outcome=Outcome.REJECTED, prompt_tokens=0, cached_tokens=0))
    (row,) = clients.last(60).clients
    assert (row.requests, row.rejected) == (1, 1)


def test_a_request_of_its_own_client_is_not_another_client() -> None:
    clients = Clients(Clock())
    account = EngineAccount(others_ns={"decode": [OthersTime(Whose.SAME_CLIENT, "alice", MS, MS, MS)]})
    clients.add(record_at(0, 0, 0, 0, 0, 10, 20, 30, client="alice", account=account))
    assert clients.last(60).clients == [ClientRow("alice", 1)]


def test_a_window_has_the_requests_that_ended_in_it() -> None:
    clock = Clock()
    clients = Clients(clock)
    for name, later_seconds in (("first", 0), ("second", 600), ("third", 2000)):
        clock.now_ns += later_seconds * SECOND_NS
        clients.add(ended(name))
    for seconds, number in ((10, 1), (1990, 1), (2010, 2), (2590, 2), (2620, 3), (3600, 3)):
        assert len(clients.last(seconds).clients) == number, seconds
    clock.now_ns += WINDOW_SECONDS * SECOND_NS
    clients.add(ended("fourth"))
    assert [row.client for row in clients.last(WINDOW_SECONDS).clients] == ["fourth"]
    assert len(clients._pieces) == 1, "older ones are forgotten"


def test_clients_after_the_first_in_a_piece_of_time_have_one_row() -> None:
    clients = Clients(Clock())
    for number in range(MOST_CLIENTS + 7):
        clients.add(ended(f"{number}", 100 - number))
    found = clients.last(PIECE_SECONDS).clients
    assert len(found) == MOST_CLIENTS + 1
    assert next(row for row in found if row.client == FURTHER_CLIENTS).requests == 7


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["a", "b", "c"]), st.integers(0, 99))))
def test_what_clients_waited_for_others_is_what_others_made_them_wait(waits: list[tuple[str, str, int]]) -> None:
    clients = Clients(Clock())
    for own, other, ms in waits:
        clients.add(ended(own, **({other: ms} if other != own else {})))
    found = clients.last(WINDOW_SECONDS).clients
    assert sum(row.waited_ns for row in found) == sum(row.delayed_ns for row in found)
    assert sum(row.requests for row in found) == len(waits)
