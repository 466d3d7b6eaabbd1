"""Requests through the gateway: the replicas' own answers, at the right replica, and what is left of them in faults."""

import asyncio
import gzip
import http.client
import json
import random
import re
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any

import httpx
import pytest
from backports import zstd
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oaiserve.facts.record import DeadlineOutcome
from oaiserve.plugins.gateway import sources, watch
from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.gateway import span_name
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.sources import Url, addresses_of
from oaiserve.plugins.gateway.watch import USUAL, _within
from oaiserve.runtime import THREADS
from oaiserve.telemetry import tracing
from oaiserve.wire.prefix_keys import key_of_session, prompt_of
from oaiserve.wire.router import score, seed_of
from oaiserve.wire.routing_decision import of_text
from tests.e2e.raw_client import send_request
from tests.engine.doubles import TIMEOUT_SECONDS
from tests.plugins.gateway.doubles import (
    BEHIND_A_GATEWAY,
    OPTIONS,
    SEEN_CLIENT,
    SEEN_PATHS,
    SIGNATURE,
    Fleet,
    Replica,
    fleet,
    quick,
)
from tests.serving import RunningServer
from tests.world.serving import Place

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 6


@pytest.fixture
def four(place: Place) -> Iterator[Fleet]:
    with fleet(place, 4) as running:
        yield running


def meaning(answer: httpx.Response) -> tuple[int, str, list[str]]:
    """Return the parts that two answers to one request have in common."""
    text = re.sub(r"[0-9a-f]{32}|\"created\":\d+", "", answer.text)
    text = re.sub(r'"(cached_tokens|duration_ns|\w+_ms|\w+_ns)":[0-9.]+', "", text)
    return answer.status_code, text, sorted({*answer.headers} - {"x-oaiserve-route"})


def replica_of(answer: httpx.Response) -> str:
    return answer.headers[SIGNATURE]


def reason_of(answer: httpx.Response) -> str:
    return answer.headers["x-oaiserve-route"].split(";")[0].removeprefix("reason=")


REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", COMPLETIONS, {"prompt": "Hello", "max_tokens": 20}),
    ("POST", COMPLETIONS, {"prompt": "Hello", "max_tokens": 1, "stream": True}),
    ("POST", COMPLETIONS, {"prompt": "Hello", "temperature": -1}),
    ("POST", COMPLETIONS, {"prompt": "Hello", "model": "other"}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/models/m?x=y", {}),
    ("GET", "/nothing", {}),
    ("POST", "/tokenize", {"prompt": "Hello"}),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_an_answer_is_the_replicas_own(four: Fleet, method: str, path: str, body: dict[str, Any]) -> None:
    def ask(http: httpx.Client) -> httpx.Response:
        return http.request(method, path, json=body or None, headers={"x-request-id": "mine"})

    with four.straight() as alone:
        expected = ask(alone)
        got = ask(four.http)
    assert meaning(got) == meaning(expected)
    assert got.headers["x-request-id"] == "mine"
    assert replica_of(got) in four.replicas


def test_the_record_of_a_request_has_its_id_its_trace_and_why_it_came_here_whatever_clients_say(
    four: Fleet,
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"x-request-id": "known", "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    lies = {"x-forwarded-for": "6.6.6.6", "forwarded": "for=6.6.6.6", "x-oaiserve-route": "replica=a; reason=b"}
    answer = four.ask(headers=headers | lies)
    records = four.replicas[replica_of(answer)].telemetry.records
    while (record := records.get()).request_id != "known":
        pass
    assert record.trace.trace_id_hex == trace_id
    name = replica_of(answer)
    assert record.routing == of_text(f"replica={name}; " + answer.headers["x-oaiserve-route"]) != {}
    assert answer.headers[SEEN_CLIENT] == "127.0.0.1"
    assert name not in str([*answer.headers.items()][:-1]).replace(f"'{SIGNATURE}', '{name}'", "")
    assert answer.headers["traceresponse"].startswith(f"00-{trace_id}-")


def test_the_requests_of_a_session_stay_together(place: Place) -> None:
    with fleet(place, 4) as idle:  # So few make no replica of it busy, however fast they come.
        assert len({replica_of(idle.ask(f"{number}", headers={"x-session-id": "one"})) for number in range(4)}) == 1


def test_what_a_replica_computed_for_others_is_known_from_its_reports(four: Fleet) -> None:
    text = "Known to one. " + LONG
    owner = [*four.replicas.values()][2]
    key = prompt_of({"prompt": text}).keys[0]
    with four.straight(owner.name) as http:
        assert http.post(COMPLETIONS, json={"prompt": text, "max_tokens": 2}).status_code == 200
    four.wait_for(lambda: four.gateway.router.fleet.holders.find(key))
    answer = four.ask(text)
    assert (replica_of(answer), reason_of(answer)) == (owner.name, "prefix")
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 400


def test_what_the_gateway_refuses_itself_is_an_error_in_openais_form(four: Fleet) -> None:
    for status, answer in (
        (404, four.http.get("/debug/report")),
        (404, four.http.post("/v1/load_lora_adapter", json={})),
        (403, four.http.get("/v1/models", headers={"host": "evil.example"})),
        (403, four.http.get("/v1/models", headers={"origin": "http://evil.example"})),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


PARTS = ("", "", ".", "..", "%2e%2e", "debug", "%64ebug", "requests", "dashboard", "report", "v1", "models", "metrics",
         "unload_lora_adapter", "%2f", "%252f", "%5c", ";a", "%00", "?a", "%c0%ae")  # fmt: skip


def test_no_spelling_of_a_path_reaches_what_is_about_one_replica(four: Fleet) -> None:
    """A replica must read each path as the gateway has judged it: 500 of them."""
    rng = random.Random(0)
    known = len(SEEN_PATHS)
    paths = ["//debug/report", "/%2fdebug/report", "/debug//report/", "/debug/requests/../report"]
    paths += ["/" + "/".join(rng.choices(PARTS, k=rng.randint(1, 5))) for _ in range(500)]
    found = [raw_answer(four, path) for path in paths]
    seen = [re.sub("/+", "/", path) for path in SEEN_PATHS[known:]]
    assert len(seen) > 50
    seen = [path for path in seen if not path.startswith("/debug/requests")]  # read from all replicas
    assert not [path for path in seen if path.startswith(("/debug", "/dashboard", "/v1/unload")) or "/../" in path]
    assert {status for status, _ in found} <= {200, 308, 400, 404, 405}  # 308: a page whose path ends in slashes
    assert [status for status, _ in found[:4]] == [404] * 4
    assert raw_answer(four, "/v1//models/")[0] == 200
    assert b"oaiserve_gateway_" in raw_answer(four, "//metrics")[1], "it is the gateway's own"


def raw_answer(running: Fleet, path: str) -> tuple[int, bytes]:
    """Return status and body for a path that httpx would tidy."""
    connection = http.client.HTTPConnection("127.0.0.1")
    connection.sock = running.connect()
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("coding", ["zstd", "gzip", "identity, deflate"])
def test_a_compressed_body_is_decoded_for_its_prompt(four: Fleet, coding: str) -> None:
    compress = {"zstd": zstd.compress, "gzip": gzip.compress}.get(coding, zlib.compress)
    headers = {"content-type": "application/json", "content-encoding": coding}

    def post(body: dict[str, Any], headers: dict[str, str] = headers) -> httpx.Response:
        content = compress(json.dumps(body).encode())
        return four.http.post(COMPLETIONS, content=content, headers=headers)

    prompt = f"The words of a long prompt in {coding}. " * 20
    four.ask(prompt)
    answers = [post({"prompt": prompt, "max_tokens": 4}) for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert {reason_of(answer) for answer in answers} <= {"prefix", "spilled"}  # both know the prompt
    assert post({"prompt": "x" * 30_000}).status_code == 413
    assert post({"prompt": "x"}, headers | {"content-encoding": "br"}).status_code == 415
    damaged = four.http.post(COMPLETIONS, content=compress(b"{}")[:-1], headers=headers)
    assert (damaged.status_code, "cut off" in damaged.text) == (400, True)
    assert four.gateway.bodies.received.total == 0


def test_health_readiness_and_metrics_are_its_own(four: Fleet) -> None:
    assert [four.http.get(path).status_code for path in ("/health", "/ready", "/version")] == [200, 200, 200]
    response = four.http.get("/metrics")
    assert response.headers["content-encoding"] == "gzip"
    text = response.text
    for name in four.replicas:
        assert f'oaiserve_gateway_replica_up{{replica="{four.number_of(name)}"}} 1.0' in text
        assert name not in text


def test_replicas_come_and_go(place: Place) -> None:
    with fleet(place, 1) as running:
        (first,) = running.replicas
        second = running.add()
        running.wait_until_known()
        assert {replica_of(running.ask(f"{number}")) for number in range(8)} == {first, second.name}
        del running.named[0]
        running.wait_until_known()
        assert {replica_of(running.ask(f"{number}")) for number in range(8)} == {second.name}
        running.named.clear()
        running.wait_until_known()
        got = running.ask()
        assert (got.status_code, got.json()["error"]["code"]) == (503, "service_unavailable")
        assert running.http.get("/ready").status_code == 503


def session_of(running: Fleet, name: str) -> str:
    """Return a session whose first replica is this one."""
    first = (max(running.replicas, key=lambda one: score(key_of_session(str(n)), seed_of(one))) for n in count())
    return str(next(number for number, one in enumerate(first) if one == name))


def test_a_full_replica_passes_requests_on_and_a_client_learns_when_all_are_full(place: Place) -> None:
    with fleet(place, 2, gated=True, max_running=1, max_waiting=1) as running, place.threads() as threads:
        asked = []

        def ask() -> None:
            """Send one more request, all of which have the same replica first."""
            asked.append(threads.submit(running.ask, headers={"x-session-id": "one"}))

        def is_waiting(replica: Replica) -> bool:
            return replica.engine.num_waiting == 1

        ask()
        first, second = replicas = running.begun()
        ask()
        running.wait_for(lambda: is_waiting(first))
        ask()
        second.runner.started.get()
        ask()
        running.wait_for(lambda: is_waiting(second))
        refused = running.ask(headers={"x-session-id": "one"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert running.metric("oaiserve_gateway_moved_total", reason="429") == 3
        for replica in replicas:
            replica.runner.permit(1000)
        answered = [replica_of(one.result()) for one in asked]
        assert answered == [first.name, first.name, second.name, second.name]


def test_a_replica_gets_the_time_that_is_left_until_the_deadlines(place: Place) -> None:
    second_ns = 10**9
    with fleet(place, 1) as running:
        (replica,) = running.replicas.values()
        body = {"ttft_deadline_ms": 45_000, "deadline_ms": 50_000}
        assert running.ask(headers={"x-deadline-ms": "40000"}, body=body).status_code == 200
        record = replica.telemetry.next_record()
        assert record.deadline is DeadlineOutcome.MET
        assert 0 < record.deadline_ns <= 40 * second_ns
        assert 0 < record.ttft_deadline_ns <= 45 * second_ns


@pytest.mark.parametrize("text", ["0", "-1", "soon", ""])
def test_a_deadline_that_is_none_is_refused_by_the_replica(four: Fleet, text: str) -> None:
    refused = four.ask(headers={"x-deadline-ms": text})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-deadline-ms")


def test_the_faster_a_replica_reports_the_sooner_it_is_missed(place: Place) -> None:
    with fleet(place, 2, pace=quick(answer_seconds=2 * TIMEOUT_SECONDS, least_answer_seconds=0.3)) as running:
        hung, _ = running.replicas.values()
        with hung.server.hanging():
            running.wait_for(lambda: hung.name in running.watch.silent)


def test_requests_for_hung_replicas_are_refused_at_once_until_one_reports(place: Place) -> None:
    with fleet(place, 1, pace=quick(answer_seconds=0.4)) as running:
        (replica,) = running.replicas.values()
        assert running.ask().status_code == 200
        with replica.server.hanging():
            assert [running.ask().status_code for _ in range(5)] == [503] * 5
            assert running.watch.hung == {replica.name}
            assert running.metric("oaiserve_gateway_ejected_total", replica="1") == 0
        running.wait_for(lambda: not running.watch.silent)
        assert running.watch.hung == set()
        assert running.ask().status_code == 200


async def test_pause_of_the_gateway_is_no_silence_of_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    clock = loop.time
    paused_seconds = 0.0
    monkeypatch.setattr(loop, "time", lambda: clock() + paused_seconds)
    report: asyncio.Future[Any] = loop.create_future()

    async def answer() -> Any:
        return await report

    waiting = asyncio.create_task(_within(5.0, answer()))
    await asyncio.sleep(0)
    paused_seconds = 30.0
    for _ in range(5):
        await asyncio.sleep(0)
    report.set_result("report")

    assert await waiting == "report"


def test_a_trace_has_a_request_its_attempts_and_what_the_replica_makes_of_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setattr(tracing, "exporter", lambda kind: kept)
    with fleet(place, 2, pace=quick(report_seconds=TIMEOUT_SECONDS)) as running:
        victim, other = running.replicas
        running.replicas[victim].server.kill()
        client = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
        assert running.ask(headers={"x-session-id": session_of(running, victim), **client}).status_code == 200
        record = running.replicas[other].telemetry.records.get()
        place.world.settle(10.0)  # Spans are exported every five seconds.
    server, failed, answered = kept.get_finished_spans()
    assert (server.name, server.kind, server.parent.span_id) == ("POST /v1/completions", SpanKind.SERVER, 9)
    assert server.attributes["http.response.status_code"] == 200
    assert {span.context.trace_id for span in (server, failed, answered)} == {7, record.trace.trace_id}
    assert {span.parent.span_id for span in (failed, answered)} == {server.context.span_id}
    assert record.trace.parent_span_id == answered.context.span_id
    assert (failed.attributes["error.type"], answered.attributes["http.response.status_code"]) == ("unreachable", 200)
    places = [f"{span.attributes['server.address']}:{span.attributes['server.port']}" for span in (failed, answered)]
    assert places == [victim, other]
    assert server.start_time <= failed.start_time <= failed.end_time <= answered.start_time
    assert answered.end_time <= server.end_time


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [(f"00-{7:032x}-{9:016x}-01", "a=1,b=2"), ("00-7-9-01", None)],
    ids=["valid", "invalid"],
)
def test_a_state_goes_on_with_the_trace_that_it_belongs_to(
    place: Place, traceparent: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setattr(tracing, "exporter", lambda kind: InMemorySpanExporter())
    with fleet(place, 1) as running:
        running.ask(headers=[("traceparent", traceparent), ("tracestate", "a=1"), ("tracestate", "b=2")])
        (replica,) = running.replicas.values()
        record = replica.telemetry.records.get()
    assert (record.trace.trace_id == 7, record.trace.tracestate) == (expected is not None, expected)


@pytest.mark.parametrize(
    ("method", "path", "status", "name"),
    [
        ("POST", "/v1/chat/completions", 200, "POST /v1/chat/completions"),
        ("POST", "/v1/completions", None, "POST /v1/completions"),
        ("GET", "/v1/files/file-1/content", 200, "GET /v1/files/{id}/content"),
        ("GET", "/v1/conversations/conv_1/items/msg_2", 200, "GET /v1/conversations/{id}/items/{id}"),
        ("GET", "/v1/batches", 200, "GET /v1/batches"),
        ("GET", "/v1/batches/batch_1", 404, "GET"),
        ("GET", "/admin.php", None, "GET"),
        ("SCAN", "/v1/completions", 405, "HTTP"),
    ],
)
def test_names_of_spans_have_no_ids_and_no_paths_without_a_route(
    method: str, path: str, status: int | None, name: str
) -> None:
    assert span_name(method, path, status) == name


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(place: Place, stream: bool) -> None:
    with fleet(place, 1, gated=True) as running:
        (replica,) = running.replicas.values()
        sock = send_request(running, prompt="Hi", max_tokens=20, stream=stream)
        replica.runner.started.get()  # its prompt is being computed
        sock.close()
        place.world.settle()
        assert running.watch.upstreams[replica.name].num_open == 0
        assert running.metric("oaiserve_gateway_requests_total", ending="cancelled") == 1
        replica.runner.permit(100)  # the replica may learn of it some steps later
        running.wait_for(lambda: replica.engine.snapshot().load.num_open == 0)
        running.wait_for(lambda: replica.engine.snapshot().idle_since_ns is not None)


def test_a_server_that_gives_no_reports_is_used_all_the_same(place: Place) -> None:
    # On such an address, a server without keys shows its reports to nobody.
    with fleet(place, 2, server=replace(BEHIND_A_GATEWAY, host="0.0.0.0", allowed_host=("127.0.0.1",))) as running:
        assert all(upstream.has_warned_of_reports for upstream in running.watch.upstreams.values())
        answers = [running.ask(f"{LONG}{number}") for number in range(4)]
        assert len({replica_of(answer) for answer in answers}) == 1
        assert [reason_of(answer) for answer in answers] == ["new", "prefix", "prefix", "prefix"]


def test_servers_are_taken_from_a_list_that_is_not_empty() -> None:
    answers: Any = [[{"targets": ["10.0.0.5:8000", "[::1]:81"], "labels": {}}], [], [{"labels": {}}]]

    async def listed(request: Request) -> Response:
        return JSONResponse(answers.pop(0))

    app = Starlette(routes=[Route("/cluster/targets", listed)])
    with RunningServer(app, OPTIONS) as server:
        source = Url(f"{server.url}/cluster/targets", (), addresses_of)
        found = asyncio.run(source.addresses())
        assert [(one.ip, one.port) for one in found] == [("10.0.0.5", 8000), ("::1", 81)]
        for _ in range(2):
            with pytest.raises(OSError, match=r"lists no servers|cannot be read"):
                asyncio.run(source.addresses())


def test_a_list_of_servers_that_comes_late_is_given_up_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LIST_SECONDS", 0.2)

    async def listed(request: Request) -> Response:
        await asyncio.sleep(1)
        return JSONResponse([])

    with RunningServer(Starlette(routes=[Route("/targets", listed)]), OPTIONS) as server:
        source = Url(f"{server.url}/targets", (), addresses_of)
        with pytest.raises(OSError, match=r"^the list of servers cannot be read \(no answer within 0.2 seconds\)$"):
            asyncio.run(source.addresses())


async def test_replicas_are_looked_up_again_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    is_found = asyncio.Event()

    class Faulty:
        name = "a list"
        num_looks = 0

        async def addresses(self) -> list[Address]:
            self.num_looks += 1
            if self.num_looks == 1:
                raise ValueError("no such thing was expected")
            is_found.set()
            return []

    at_once = USUAL._replace(resolve_seconds=0)
    watching = asyncio.create_task(watch.Watch(Routers(), [Faulty()], (), at_once, THREADS.clock_ns).run())
    await is_found.wait()
    watching.cancel()
    assert "no such thing was expected" in caplog.text


async def test_numbers_are_given_again_however_many_replicas_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number has counters in the gateway's metrics."""
    monkeypatch.setattr(watch, "MOST_NUMBERS", 2)
    ports = [1]

    class Listed:
        name = "a list"

        async def addresses(self) -> list[Address]:
            return [Address("127.0.0.1", port, f"server {port}") for port in ports]

    watched = watch.Watch(Routers(), [Listed()], (), USUAL, THREADS.clock_ns)

    async def number_of(port: int) -> int:
        ports[:] = [port]
        await watched.look()
        (upstream,) = watched.upstreams.values()
        return upstream.number

    numbers = [await number_of(port) for port in range(1, 100)]
    assert {*numbers} == {1, 2, 3, 4}
    assert await number_of(98) == numbers[-2]
    ports.clear()
    await watched.look()
