"""The report of a server with several replicas."""

from array import array

from oaiserve.wire.report import MOST_KEYS, ReplicaReport, together


def report(name: str, number: int, keys: range) -> ReplicaReport:
    more = {"num_running": 4 * number, "num_waiting": number, "kv_use": number / 4, "step_seconds": number / 10}
    return ReplicaReport(name, f"process {name}", number, 1.5 * number, 10.0 * number, array("Q", keys), **more)


def test_loads_are_added_and_shares_are_means() -> None:
    both = together([report("0", 1, range(3)), report("1", 3, range(2, 4))])
    assert (both.num_open, both.waiting_tokens, both.num_running, both.num_waiting) == (6.0, 40.0, 16, 4)
    assert (both.kv_use, both.step_seconds) == (0.5, 0.2)


def test_the_most_useful_keys_of_each_replica_come_first() -> None:
    both = together([report("0", 1, range(3)), report("1", 2, range(2, 4))])
    assert [*both.keys] == [0, 2, 1, 3]
    many = together([report("0", 1, range(MOST_KEYS)), report("1", 2, range(MOST_KEYS, 2 * MOST_KEYS))])
    assert len(many.keys) == MOST_KEYS
    assert {MOST_KEYS, 0} <= {*many.keys}
