"""Tests /debug/requests: its filters and the account of one request; and /debug/report."""

import base64
import struct
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.request import Usage
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.open_row import MOST_SHOWN, OpenRow
from oaiserve.facts.record import Cause, EngineAccount, Origin, OthersTime, Outcome, Whose
from oaiserve.facts.times import ALL_PHASES, TEXT_PHASES, RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.open_requests import open_request, open_requests
from oaiserve.runtime import THREADS
from oaiserve.telemetry import Measured, Telemetry
from oaiserve.telemetry.recent import RecentRequests
from tests.records import MS, record_at
from tests.routes.asking import refused
from tests.routes.doubles import FakeEngine, finished
from tests.serving import Serve, Served, running_server
from tests.world.serving import Place, serving

RECORD = record_at(
    *(0, 1, 2, 10, 110, 160, 310, 400), account=EngineAccount(first_step=5, num_steps=10), finish_reasons=("stop",)
)


@pytest.fixture
def some(place: Place) -> Iterator[Served]:
    """Give a server that remembers three requests."""
    with serving(place, Config("org/demo")) as server:
        remember(server.telemetry.recent)
        yield server


def remember(recent: RecentRequests) -> None:
    recent.add(RECORD)
    job = {"client": "ann", "http_route": "/v1/completions", "model": "tuned", "trace": TraceContext(0xDEF0 << 112, 1)}
    recent.add(record_at(0, 1, 2, 4, 900, 1000, request_id="job-2", outcome=Outcome.REJECTED, **job))
    shared = EngineAccount(
        first_step=14, num_steps=3, num_prefill_steps=2, prefill_causes_ns={Cause.ALONE: MS}, decode_causes_ns={}
    )
    recent.add(record_at(0, 1, 2, 3, 4, 5, 6, 7, request_id="req-3", account=shared, prompt_tokens=7))


def ids(served: Served, query: str = "") -> list[str]:
    response = served.http.get(f"/debug/requests{query}")
    assert response.status_code == 200, response.text
    return [entry["request_id"] for entry in response.json()["requests"]]


def test_the_list_can_be_filtered_sorted_and_cut(some: Served) -> None:
    assert ids(some) == ["req-3", "job-2", "req-1"]
    assert ids(some, "?slowest=queue") == ["job-2", "req-1", "req-3"]
    assert ids(some, "?slowest=decode") == ["req-1", "req-3"]
    assert ids(some, "?outcome=rejected") == ["job-2"]
    assert ids(some, "?id=req") == ["req-3", "req-1"]
    for query in ("failed=true", "slow=1000", "client=ann", "model=tuned", "route=/v1/completions", "id=def0"):
        assert ids(some, f"?{query}") == ["job-2"], query
    for query in ("client=", "model=demo", "route=/v1/chat/completions"):
        assert ids(some, f"?{query}") == ["req-3", "req-1"], query
    assert ids(some, "?failed=false&slow=7") == ["req-3", "job-2", "req-1"]
    assert ids(some, "?id=req&slowest=queue&limit=1&outcome=finished") == ["req-1"]


@pytest.mark.parametrize(
    ("path", "param", "says"),
    [
        ("?slowest=lunch", "slowest", f"must be one of {', '.join(ALL_PHASES)}, got 'lunch'"),
        ("?outcome=", "outcome", "must be one of finished, cancelled, rejected, failed, got ''"),
        ("?limit=0", "limit", "must be an integer >= 1, got '0'"),
        ("?limit=1.5", "limit", "must be an integer >= 1"),
        ("?limit=-1", "limit", "must be an integer >= 1"),
        ("?limit=" + "9" * 5000, "limit", "must be an integer >= 1"),
        ("?outcom=failed", "outcom", "this route takes slowest, outcome, failed, slow, client"),
        ("?slow=-1", "slow", "must be an integer >= 1"),
        ("?failed=yes", "failed", "must be one of true, false, got 'yes'"),
    ],
)  # fmt: skip
def test_a_malformed_query_is_refused(some: Served, path: str, param: str, says: str) -> None:
    response = some.http.get(f"/debug/requests{path}")
    refused(response, param, says)
    assert len(response.json()["error"]["message"]) < 300


OPEN = OpenRow.of(
    Origin("req-9", "chat", "/v1/chat/completions", "org/demo"), RequestTimes(received=5), lambda: 5 + 3 * MS, 0
)


def test_open_requests_are_in_the_list(some: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(some.telemetry.recent, "_open_requests", lambda *_: {"of the engine": OPEN})
    shown = msgspec.to_builtins(OPEN)
    for query, is_shown in {
        "": True,
        "client=": True,
        "client=ann": False,
        "model=org/demo": True,
        "model=other": False,
        "route=/v1/completions": False,
        "slow=3": True,
        "slow=4": False,
        "id=req": True,
        "id=job": False,
        "failed=true": False,
        "outcome=finished": False,
    }.items():
        listed = some.http.get(f"/debug/requests?{query}").json()
        assert listed["open"] == ([shown] if is_shown else []), query


def test_rows_of_a_list_agree_with_the_whole_accounts(some: Served) -> None:
    whole, rows = (some.http.get(f"/debug/requests?form={form}").json()["requests"] for form in ("whole", "row"))
    for entry, row in zip(whole, rows, strict=True):
        assert all(row[name] == entry[name] for name in row.keys() - {"phases"})
        phases = [[phase["name"], phase["duration_ns"]] for phase in entry["phases"]]
        assert [phase[:2] for phase in row["phases"]] == phases
    assert ["prefill", MS, MS, MS, MS] in rows[0]["phases"]  # with its time alone, and the sums after that


def test_clients_of_the_last_minutes_are_listed(serve: Serve) -> None:
    served = serve()
    account = EngineAccount(others_ns={"queue": [OthersTime(Whose.OTHER_CLIENT, "batchjob", 5 * MS, MS, 0)]})
    served.telemetry.clients.add(record_at(0, 1, 2, 3, 4, 5, 6, 7, client="ann", account=account))
    for query, seconds in (("", 300), ("?seconds=3600", 3600)):
        listed = served.http.get(f"/debug/clients{query}").json()
        assert listed["seconds"] == seconds
        assert [(row["client"], row["delayed_ns"], row["waited_ns"]) for row in listed["clients"]] == [
            ("batchjob", 6 * MS, 0),
            ("ann", 0, 6 * MS),
        ]
    refused(served.http.get("/debug/clients?seconds=0"), "seconds", "must be an integer from 1 to 3600, got '0'")


def test_one_of_them_has_its_phases_and_the_requests_in_its_steps(some: Served) -> None:
    entry = some.http.get("/debug/requests/req-1").json()
    assert (entry["request_id"], entry["duration_ns"]) == ("req-1", 400 * MS)
    assert [phase["name"] for phase in entry["phases"]] == list(TEXT_PHASES)
    assert [other["request_id"] for other in entry["neighbours"]] == ["req-3"]


def test_a_request_is_open_from_its_first_byte_until_its_answer_is_written(served: Served) -> None:
    looks: list[list[dict[str, Any]]] = []

    def look() -> None:
        looks.append(client.get("/debug/requests").json()["open"])
        if looks[-1]:
            alone = client.get("/debug/requests/slow").json()
            assert (alone["request_id"], alone["phase"]) == ("slow", "receive")

    def body() -> Iterator[bytes]:
        yield b'{"model": "org/demo", '
        while not looks or not looks[-1]:  # the server has not read it yet
            look()
        yield b'"prompt": "a", "max_tokens": 1}'

    headers = {"content-type": "application/json", "x-request-id": "slow"}
    client = served.client()
    assert client.post("/v1/completions", content=body(), headers=headers).status_code == 200
    (row,) = looks[-1]
    assert (row["request_id"], row["phase"], row["prompt_tokens"]) == ("slow", "receive", 0)
    assert (row["operation"], row["route"], row["model"]) == ("text_completion", "/v1/completions", "org/demo")
    assert [phase["name"] for phase in row["phases"]] == ["receive"]
    look()
    assert looks[-1] == []


def serving_with(in_engine: dict[str, OpenRow], exchanges: dict[str, Exchange]) -> Any:
    recent = SimpleNamespace(open=lambda engine_id=None: in_engine if engine_id in (None, *in_engine) else {})
    telemetry = SimpleNamespace(recent=recent)
    return SimpleNamespace(telemetry=telemetry, exchanges=exchanges, name_of=lambda adapter: "demo", runtime=THREADS)


def received(name: str, received_ns: int) -> Exchange:
    return Exchange(name, name, TraceContext.from_headers(None, None), "", THREADS.clock_ns, received_ns=received_ns)


def test_only_the_newest_requests_outside_the_engine_are_listed() -> None:
    exchanges = {str(number): received(str(number), number) for number in range(1, 3 * MOST_SHOWN)}
    rows = open_requests(serving_with({}, exchanges))
    assert [row.request_id for row in rows] == [*reversed(exchanges)][:MOST_SHOWN]
    oldest = open_request(serving_with({}, exchanges), "1")
    assert oldest is not None
    assert oldest.request_id == "1"


def test_answer_being_written_is_open_and_requests_of_the_engine_are_listed_once() -> None:
    times = RequestTimes(received=10, submitted=20, tokenize_started=30, tokenized=40, scheduled=50, first_token=60)
    in_engine = OpenRow.of(Origin("running"), times, lambda: 70, 0)
    exchanges = {}
    for name, engine_id, terminal in (("running", "e1", None), ("writing", "e2", True), ("ending", "e3", None)):
        exchange = received(name, 10)
        exchange.engine_id = engine_id
        ended = finished(engine_id, Usage(7, 4, 2))
        ended.times = replace(times, last_token=65)
        stream = SimpleNamespace(ended=bool(terminal), terminal=terminal and ended, times=ended.times)
        exchange.stream = cast(Any, stream)
        exchanges[name] = exchange
    rows = {row.request_id: row for row in open_requests(serving_with({"e1": in_engine}, exchanges))}
    assert rows.keys() == {"running", "writing"}  # the end of the third one is on its way to this process
    assert (rows["running"].phase, rows["writing"].phase) == ("decode", "respond")
    writing = rows["writing"]
    assert (writing.prompt_tokens, writing.cached_tokens, writing.computed_prompt_tokens) == (7, 4, 7)
    assert writing.completion_tokens == 2
    assert open_request(serving_with({"e1": in_engine}, exchanges), "running") is in_engine
    for name in ("writing", "ending"):
        found = open_request(serving_with({"e1": in_engine}, exchanges), name)
        assert found is not None
        assert found.request_id == name
    assert open_request(serving_with({"e1": in_engine}, exchanges), "nobody") is None


def test_a_request_is_found_by_its_trace_as_exemplars_have_that(some: Served) -> None:
    assert some.http.get(f"/debug/requests/{0xDEF0 << 112:032x}").json()["request_id"] == "job-2"


def test_a_request_that_has_ended_is_found_before_its_account_is_written() -> None:
    config = Config("org/demo")
    telemetry = Telemetry(Measured("org/demo", "", EngineNumbers), recent_requests=8, environ={}, runtime=THREADS)
    with running_server(create_app(config, FakeEngine(), telemetry), config.server) as (url, _):
        for name in ("first", "second", "third"):
            body = {"model": "org/demo", "prompt": "a", "max_tokens": 1}
            httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": name}).raise_for_status()
            assert httpx.get(f"{url}/debug/requests/{name}").json()["request_id"] == name


def test_an_unknown_id_is_a_404_which_says_how_many_are_kept(some: Served) -> None:
    says = "There is no request 'nobody' here. This server keeps the last 256 that have ended (--recent-requests)"
    refused(some.http.get("/debug/requests/nobody"), None, says, status=404)


def test_the_report_has_its_keys_in_64_bits_each(served: Served) -> None:
    got = served.http.get("/debug/report")
    assert got.status_code == 200
    report = got.json()
    assert [*struct.unpack("<2Q", base64.b64decode(report.pop("keys")))] == [1, 2**64 - 1]
    assert report == {
        "incarnation": "fake",
        "number": 3,
        "num_open": 1.5,
        "waiting_tokens": 20.0,
        "num_running": 2,
        "num_waiting": 1,
        "kv_use": 0.25,
        "is_ready": True,
        "step_seconds": 0.0,
        "is_hung": False,
        "models": ["org/demo"],
        "aliases": [],
    }
