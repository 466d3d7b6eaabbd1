"""Replicas that answer what is no HTTP, has no end or is an error, or nothing: what clients and operators notice."""

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from oaiserve.plugins.gateway import relay, upstream, watch
from oaiserve.plugins.gateway.app import create_gateway
from oaiserve.plugins.gateway.gateway import Gateway
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.plugins.gateway.watch import Pace
from oaiserve.runtime import THREADS, Runtime, Threads
from oaiserve.wire.address import Address
from tests.engine.doubles import TIMEOUT_SECONDS
from tests.plugins.gateway.doubles import OPTIONS, QUICK, quick
from tests.serving import RunningServer
from tests.waiting import wait_until

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: one\n\n"


class RawReplica:
    """Answers each request with `answer`, byte for byte, except those for its reports. `answers` has those for paths
    that begin with a text. An iterable is sent until the gateway has enough."""

    def __init__(self) -> None:
        self.answer = GOOD
        self.answers: dict[bytes, bytes | Iterable[bytes]] = {}
        self.num_sent_bytes = 0
        self.ready_status = b"200"
        self.num_asked = self.num_reports = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listening.getsockname()[1], "raw")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                threading.Thread(target=self._serve, args=self._listening.accept()[:1], daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError), sock.makefile("rb") as reader:
            while head := reader.readline():
                while (line := reader.readline()).strip():
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                reader.read(length)
                is_report = head.startswith((b"GET /debug/report", b"GET /ready"))
                status = b"404" if head.startswith(b"GET /debug/report") else self.ready_status
                self.num_reports += is_report
                self.num_asked += not is_report
                own = b"HTTP/1.1 %b OK\r\ncontent-length: 0\r\n\r\n" % status
                answer = next((one for path, one in self.answers.items() if head.startswith(b"GET " + path)), None)
                answer = answer or (own if is_report else self.answer)
                for part in [answer] if isinstance(answer, bytes) else answer:
                    sock.sendall(part)
                    self.num_sent_bytes += len(part)

    def close(self) -> None:
        self._listening.close()


@contextmanager
def gateway_before(
    *replicas: RawReplica, pace: Pace = QUICK, runtime: Runtime = THREADS, **options: Any
) -> Iterator[tuple[Gateway, httpx.Client]]:
    async def resolve(url: str) -> list[Address]:
        return [replica.address for replica in replicas]

    app, made = create_gateway(RouteOptions(replica=("http://raw",), **options), resolve, pace, runtime)
    with (
        RunningServer(app, OPTIONS, on_drain=made.drain) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS) as http,
    ):
        wait_until(lambda: len(made.watch.joined) == len(replicas))
        yield made, http


@pytest.fixture
def two() -> Iterator[tuple[RawReplica, RawReplica]]:
    replicas = RawReplica(), RawReplica()
    yield replicas
    for replica in replicas:
        replica.close()


@pytest.fixture(scope="module")
def raw() -> Iterator[tuple[RawReplica, httpx.Client]]:
    replica = RawReplica()
    with gateway_before(replica) as (_, http):
        yield replica, http
    replica.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 999 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 099 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"SMTP 220 hello\r\n",
        b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * upstream.MOST_HEAD_BYTES * 2,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * upstream.MOST_HEAD_BYTES,
        b"HTTP/1.1 100 Continue\r\n\r\n" * upstream.MOST_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
    ids=[
        *("high status", "low status", "protocol", "no HTTP", "long header", "headers", "interim answers"),
        *("many headers", "a head without an end", "a huge length", "two framings"),
    ],
)
def test_an_answer_that_is_no_http_is_a_502(
    raw: tuple[RawReplica, httpx.Client], answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, http = raw
    replica.answer = answer
    with monkeypatch.context() as patch:
        patch.setattr(upstream, "HEAD_SECONDS", 0.2)
        got = http.post("/v1/completions", json={"prompt": "Hello"})
    assert (got.status_code, got.json()["error"]["code"]) == (502, "bad_gateway")
    assert str(replica.address.port) not in got.text
    replica.answer = GOOD
    assert http.post("/v1/completions", json={"prompt": "Hello"}).text == "good"


def test_interim_answers_are_none_of_the_answer(raw: tuple[RawReplica, httpx.Client]) -> None:
    replica, http = raw
    replica.answer = b"HTTP/1.1 103 Early Hints\r\nx-early: 1\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + GOOD
    got = http.get("/v1/models")
    assert (got.status_code, got.text, "x-early" in got.headers) == (200, "good", False)


def test_bytes_behind_an_answer_are_not_the_next_one(raw: tuple[RawReplica, httpx.Client]) -> None:
    replica, http = raw
    replica.answer = GOOD + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison"
    assert [http.get("/v1/models").text for _ in range(4)] == ["good"] * 4
    replica.answer = GOOD + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"
    assert [http.get("/v1/models").text for _ in range(4)] == ["good"] * 4


def test_an_event_without_end_ends_its_stream_with_an_error(
    raw: tuple[RawReplica, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, http = raw
    monkeypatch.setattr(relay, "MOST_EVENT_BYTES", 100_000)
    replica.answer = STREAM + b"data: " + b"a" * 300_000
    lines = http.post("/v1/completions", json={"prompt": "Hello", "stream": True}).text.splitlines()
    assert (lines[0], lines[-2]) == ("data: one", "data: [DONE]")
    assert json.loads(lines[2].removeprefix("data: "))["error"]["code"] == "service_unavailable"
    lines = http.post("/v1/messages", json={"messages": [], "stream": True}).text.splitlines()
    assert (lines[0], lines[2]) == ("data: one", "event: error")
    assert json.loads(lines[3].removeprefix("data: "))["error"]["type"] == "overloaded_error"


BROKEN = b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"


def ask_some(http: httpx.Client, number: int = 40) -> set[int]:
    return {http.post("/v1/completions", json={"prompt": f"{one}"}).status_code for one in range(number)}


def test_a_replica_whose_requests_fail_is_left_out_for_longer_each_time(
    two: tuple[RawReplica, RawReplica], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later_ns = [0]
    runtime = Threads(lambda: THREADS.clock_ns() + later_ns[0])
    broken, good = two
    broken.answer = BROKEN
    before = gateway_before(*two, pace=quick(pause_seconds=100), runtime=runtime)
    with before as (made, http), caplog.at_level("WARNING"):
        monkeypatch.setattr(watch, "MOST_PAUSE_SECONDS", 250)
        out = made.watch.upstreams[broken.address.name]
        for times, seconds in enumerate((100, 200, 250), start=1):
            # The other one is silent, too, behind the leap in time: until its next report, any is as good as it.
            wait_until(lambda: out.name not in made.watch.silent and good.num_reports > 2)
            assert ask_some(http) == {200}, "the other one answers in its place"
            lines = [line for line in caplog.messages if "because they keep failing" in line]
            assert (len(lines), f"gets no requests for {seconds} s" in lines[-1]) == (times, True)
            labels = {"replica": str(out.number)}
            assert made.metrics.registry.get_sample_value("oaiserve_gateway_ejected_total", labels) == times
            assert broken.num_asked == watch.MOST_FAILURES + times - 1
            later_ns[0] += seconds * 10**9
            good.num_reports = 0
        broken.answer = GOOD
        wait_until(lambda: out.name not in made.watch.silent)
        assert ask_some(http) == {200}
        assert out.num_pauses == 0


def test_of_replicas_that_all_fail_half_are_left_out(two: tuple[RawReplica, RawReplica]) -> None:
    for replica in two:
        replica.answer = b"SMTP 220 hello\r\n"
    with gateway_before(*two, pace=quick(pause_seconds=1000)) as (made, http):
        assert ask_some(http) == {502}
        assert len(made.watch.silent) == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_request_at_which_all_replicas_fail_puts_none_out(two: tuple[RawReplica, RawReplica], number: int) -> None:
    with gateway_before(*two[:number], pace=quick(pause_seconds=1000)) as (made, http):
        for replica in two:
            replica.answer = BROKEN
        for path in ("/v1/completions", "/v1/files", "/v1/batches", "/v1/nothing"):
            for session in "abcd":
                answer = http.post(path, json={}, headers={"x-session-id": session})
                assert answer.status_code == 500
        assert not made.watch.silent
        assert sum(replica.num_asked for replica in two) == (8 * number + 8), "two at most are asked for each"
        assert [one.num_failures for one in made.watch.upstreams.values()] == [0] * number


def test_a_failure_is_not_hidden_by_a_replica_that_does_not_know_what_it_is_about(
    two: tuple[RawReplica, RawReplica],
) -> None:
    two[0].answer = BROKEN
    two[1].answer = BROKEN.replace(b"500", b"404")
    seen: set[int] = set()
    with gateway_before(*two) as (made, http):
        # On a busy machine, one of them may be silent for a moment.
        wait_until(lambda: seen.update(ask_some(http, 4)) or seen == {404, 500})
        assert not any(one.num_failures for one in made.watch.upstreams.values())


def test_the_answer_that_is_not_passed_on_is_not_held(two: tuple[RawReplica, RawReplica]) -> None:
    endless = b"HTTP/1.1 %d No\r\ntransfer-encoding: chunked\r\n\r\n"
    with gateway_before(*two) as (made, http):
        for status in (500, 503, 429):
            two[0].answer = endless % status
            assert ask_some(http, 8) == {200}
        bad = made.watch.upstreams[two[0].address.name]
        wait_until(lambda: not bad.connections - {*bad.idle})


def test_no_reports_are_logged_once(two: tuple[RawReplica, RawReplica], caplog: pytest.LogCaptureFixture) -> None:
    with gateway_before(two[0]) as (made, _):
        for status in (b"503", b"200", b"503"):
            two[0].ready_status = status
            wait_until(lambda: made.is_ready is (two[0].ready_status == b"200"))
    assert sum("gives no reports" in line for line in caplog.messages) == 1
