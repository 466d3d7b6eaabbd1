"""Tests of the count of connections and of its limits."""

import resource
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.config import ServerOptions
from oaiserve.errors import StartupError
from oaiserve.http.connections import MOST_CONNECTIONS, Connections, Refusal, allowed_connections
from oaiserve.runtime import THREADS

ADDRESSES = ("192.0.2.1", "192.0.2.2", "2001:db8::1")


@given(st.integers(1, 6), st.integers(0, 3), st.lists(st.tuples(st.booleans(), st.sampled_from(ADDRESSES))))
def test_limits_hold_whatever_is_opened_and_closed(most: int, most_per_address: int, events: list) -> None:
    connections = Connections(most, most_per_address, THREADS.clock_ns)
    open_by = Counter[str]()
    for opens, address in events:
        if opens:
            refusal = connections.admit(address)
            has_room = open_by.total() < most
            address_has_room = not most_per_address or open_by[address] < most_per_address
            assert refusal == (None if has_room and address_has_room else Refusal.ADDRESS if has_room else Refusal.ALL)
            open_by[address] += refusal is None
        elif open_by[address]:
            connections.release(address)
            open_by[address] -= 1
        assert connections.num_open == open_by.total()


def test_a_network_of_ipv6_counts_as_one_address_and_mapped_ipv4_as_itself() -> None:
    connections = Connections(10, 1, THREADS.clock_ns)
    assert connections.admit("2001:db8::1") is None
    assert connections.admit("2001:db8::ffff:2%eth0") is Refusal.ADDRESS
    assert connections.admit("2001:db8:0:1::1") is None
    assert connections.admit("::ffff:192.0.2.1") is None
    assert connections.admit("::ffff:192.0.2.2") is None
    assert connections.admit("::ffff:192.0.2.1") is Refusal.ADDRESS


def test_each_refusal_is_counted_and_says_which_limit_it_keeps(caplog: pytest.LogCaptureFixture) -> None:
    connections = Connections(2, 1, THREADS.clock_ns)
    for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.3"):
        connections.admit(address)
    assert (connections.refused[Refusal.ADDRESS], connections.refused[Refusal.ALL]) == (1, 1)
    of_address, of_all = caplog.messages
    assert of_address == "Refused a connection: 192.0.2.1 has the 1 of --max-connections-per-address open"
    assert of_all == "Refused a connection: all 2 of --max-connections are open"


def test_the_default_leaves_files_to_the_server_and_half_of_the_rest_to_an_address() -> None:
    connections = allowed_connections(ServerOptions(), THREADS.clock_ns)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < connections.most <= min(MOST_CONNECTIONS, limit - 64)
    assert connections.most_per_address == connections.most // 2


def test_a_gateway_leaves_a_file_for_each_connection_to_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.http.connections._raise_open_files", lambda wanted: min(wanted, 1000))
    alone = allowed_connections(ServerOptions(), THREADS.clock_ns).most
    assert alone // 2 - 1 <= allowed_connections(ServerOptions(), THREADS.clock_ns, files_each=2).most <= alone // 2
    with pytest.raises(StartupError, match=f"room for .* connections, but --max-connections is {alone}"):
        allowed_connections(ServerOptions(max_connections=alone), THREADS.clock_ns, files_each=2)


def test_more_connections_than_files_stop_the_start() -> None:
    with pytest.raises(StartupError, match=r"--max-connections is 10000000000\. Raise the limit with 'ulimit -n'"):
        allowed_connections(ServerOptions(max_connections=10**10), THREADS.clock_ns)
