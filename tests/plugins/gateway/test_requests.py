"""Tests the accounts of requests, and the samples of the live page, that a gateway gathers from its replicas."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from oaiserve.facts.record import EngineAccount, OthersTime, Whose
from oaiserve.http.connections import Connections
from oaiserve.plugins.gateway import lists
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.plugins.gateway.samples import FleetSamples, replicas_of
from oaiserve.runtime import THREADS
from oaiserve.telemetry.request_series import RequestSeries
from oaiserve.telemetry.samples import LiveSamples
from tests.plugins.gateway.doubles import BEHIND_A_GATEWAY, Fleet, fleet
from tests.records import MS, record_at
from tests.world.serving import Place

KEY = {"authorization": "Bearer secret"}


def entries(running: Fleet, query: str = "", **more: Any) -> list[dict[str, Any]]:
    answer = running.http.get(f"/debug/requests?{query}", **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


def test_metrics_count_connections_that_the_gateway_refused(place: Place) -> None:
    with fleet(place, 1) as running:
        connections = Connections(most=1, most_per_address=0, clock_ns=place.world.clock_ns)
        running.gateway.metrics.show(connections)
        for address in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
            connections.admit(address)
        assert running.metric("oaiserve_gateway_connections") == 1
        assert running.metric("oaiserve_gateway_connections_refused_total", reason="all") == 2
        assert 'oaiserve_gateway_connections_refused_total{reason="address"} 0.0' in running.http.get("/metrics").text


def test_the_gateway_lists_the_requests_of_all_replicas_and_finds_each_of_them(place: Place) -> None:
    with fleet(place, 2) as running:
        sent = [running.ask(f"{number}").headers["x-request-id"] for number in range(6)]
        found = entries(running)
        assert {entry["request_id"] for entry in found} == {*sent}
        assert {entry["replica"] for entry in found} == {1, 2}
        assert all(a["received_unix_ns"] >= b["received_unix_ns"] for a, b in pairwise(found))
        assert [row["request_id"] for row in entries(running, "limit=2&form=row")] == [*reversed(sent)][:2]
        assert entries(running, "route=/v1/chat/completions") == []
        for form in ("whole", "row"):
            slowest = entries(running, f"slowest=decode&form={form}")
            times = [
                next(
                    one["duration_ns"] if form == "whole" else one[1] for one in entry["phases"] if "decode" in str(one)
                )
                for entry in slowest
            ]
            assert times == sorted(times, reverse=True)
        for request_id in sent:
            assert running.http.get(f"/debug/requests/{request_id}").json()["request_id"] == request_id
        unknown = running.http.get("/debug/requests/nobody")
        assert (unknown.status_code, "keeps the last 256" in unknown.text) == (404, True)
        assert running.http.get("/debug/requests?limit=0").status_code == 400


def test_the_gateway_adds_up_the_clients_of_all_replicas(place: Place) -> None:
    with fleet(place, 2) as running:
        for number, replica in enumerate(running.replicas.values()):
            waited = [OthersTime(Whose.OTHER_CLIENT, "batchjob", (number + 1) * MS, 0, 0)]
            account = EngineAccount(machine_ns=3, others_ns={"queue": waited})
            replica.telemetry.clients.add(record_at(0, 0, 0, 0, 5, 6, 7, 8, client="alice", account=account))
        found = running.http.get("/debug/clients?seconds=60").json()
        assert found["seconds"] == 60
        rows = [(row["client"], row["requests"], row["waited_ns"], row["delayed_ns"]) for row in found["clients"]]
        assert rows == [("batchjob", 0, 0, 3 * MS), ("alice", 2, 3 * MS, 0)]
        assert running.http.get("/debug/clients?seconds=0").status_code == 400


def test_a_gateway_asks_no_replica_for_more_requests_than_it_reads(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "MOST_REQUESTS", 2)
    with fleet(place, 1) as running:
        for number in range(3):
            running.ask(f"{number}")
        assert len(entries(running)) == 2


@pytest.mark.plugin("pages")
def test_an_answer_by_a_gateway_links_to_the_page_of_its_request(place: Place) -> None:
    with fleet(place, 1) as running:
        answer = running.ask()
        assert answer.links["describedby"]["url"] == f"../requests/{answer.headers['x-request-id']}"


def test_requests_of_replicas_with_keys_are_shown_to_those_with_a_key(place: Place) -> None:
    server = replace(BEHIND_A_GATEWAY, api_key=("secret",))
    with fleet(place, 2, server=server, route=RouteOptions(replica_key="secret")) as running:
        request_id = running.ask(headers=KEY).headers["x-request-id"]
        for path in ("/debug/requests", f"/debug/requests/{request_id}"):
            assert running.http.get(path).status_code == 401
            assert request_id in running.http.get(path, headers=KEY).text


class Source:
    """A replica's live page, as the gateway requests it."""

    def __init__(self, name: str, *numbers: int, clock_ms: int = 0) -> None:
        self.name = name
        self.samples = LiveSamples(RequestSeries("demo", epoch_offset_ns=lambda: 0), lambda: 0, THREADS.clock_ns)
        self.put(*numbers, clock_ms=clock_ms)

    def put(self, *numbers: int, clock_ms: int = 0) -> None:
        """Sample these seconds."""
        for number in numbers:
            at = {"number": number, "at_unix_ms": clock_ms + 1000 * number, "seconds": 1.0}
            self.samples.ring.append(SAMPLE | at)

    async def get(self, target: bytes, headers: object, most_bytes: int, seconds: float) -> tuple[int, bytes]:
        path, _, after = target.decode().partition("?after=")
        assert path == "/debug/samples"
        found = {"boundaries_seconds": self.samples.boundaries_seconds, "samples": self.samples.after(int(after))}
        return 200, msgspec.json.encode(found)


SAMPLE = {
    "running": 1,
    "waiting": 0,
    "tokenizing": 0,
    "kv_usage": 0.5,
    "kv_cached": 0.25,
    "requests": {"finished": 2},
    "generation_tokens": 10,
    "computed_tokens": 20,
    "time_to_first_token": [(3, 2)],
    "inter_token": [],
    "duration": [(4, 1), (5, 1)],
}


def samples_of(*sources: Source) -> FleetSamples:
    watch: Any = SimpleNamespace(upstreams={source.name: source for source in sources}, headers=[])
    return FleetSamples(partial(replicas_of, watch), THREADS.clock_ns)


async def test_samples_of_all_replicas_are_added_up_by_their_age() -> None:
    """One replica's clock is an hour late, and it has started later than the other."""
    one = Source("a", 1, 2, 3)
    other = Source("b", 1, 2, clock_ms=3_600_000)
    fleet_samples = samples_of(one, other)
    await fleet_samples.look(1_000_000)
    first, *others = fleet_samples.samples
    assert (first.running, first.requests, first.time_to_first_token) == (1, {"finished": 2}, [(3, 2)])
    assert [sample.at_unix_ms for sample in fleet_samples.samples] == [998_000, 999_000, 1_000_000]
    for sample in others:
        assert (sample.running, sample.generation_tokens, sample.duration) == (2, 20, [(4, 2), (5, 2)])
        assert (sample.kv_usage, sample.kv_cached) == (0.5, 0.25)
    one.put(4, 5)
    await fleet_samples.look(1_001_000)  # the other one has no new sample, so its numbers stay
    last = fleet_samples.samples[-1]
    assert (last.number, last.running, last.requests) == (4, 2, {"finished": 4})
    other.samples.ring.clear()
    other.put(1)  # it has started again
    await fleet_samples.look(1_002_000)
    assert fleet_samples.samples[-1].requests == {"finished": 2}


@pytest.mark.parametrize(
    "changes",
    [{"running": -1}, {"kv_usage": 2}, {"duration": [(10**6, 1)]}, {"requests": {"won": 1}}, {"seconds": "1"}],
)
async def test_implausible_samples_are_ignored(changes: dict[str, Any]) -> None:
    wrong = Source("a", 1)
    right = Source("b", 1)
    wrong.samples.ring[0] |= changes
    fleet_samples = samples_of(wrong, right)
    await fleet_samples.look(0)
    (sample,) = fleet_samples.samples
    assert sample.requests == {"finished": 2}
