"""Replicas that answer what is no HTTP, has no end or is an error, or nothing: what clients and operators notice."""

import json
from collections.abc import Iterator

import httpx
import pytest

from oaiserve.plugins.gateway import relay, upstream, watch
from tests.plugins.gateway.doubles import BROKEN, GOOD, RawReplica, gateway_before, quick
from tests.world.serving import Place

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: one\n\n"


@pytest.fixture
def two(place: Place) -> Iterator[tuple[RawReplica, RawReplica]]:
    replicas = RawReplica(place), RawReplica(place)
    yield replicas
    for replica in replicas:
        replica.close()


@pytest.fixture
def raw(place: Place) -> Iterator[tuple[RawReplica, httpx.Client]]:
    replica = RawReplica(place)
    with gateway_before(place, [replica.address]) as (_, http):
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
def test_an_answer_that_is_no_http_is_a_502(raw: tuple[RawReplica, httpx.Client], answer: bytes) -> None:
    replica, http = raw
    replica.answer = answer
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


def ask_some(http: httpx.Client, number: int = 40) -> set[int]:
    return {http.post("/v1/completions", json={"prompt": f"{one}"}).status_code for one in range(number)}


def test_a_replica_whose_requests_fail_is_left_out_for_longer_each_time(
    place: Place, two: tuple[RawReplica, RawReplica], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = two
    broken.answer = BROKEN
    before = gateway_before(place, [broken.address, good.address], quick(report_seconds=5.0, pause_seconds=100))
    with before as (made, http), caplog.at_level("WARNING"):
        monkeypatch.setattr(watch, "MOST_PAUSE_SECONDS", 250)
        out = made.watch.upstreams[broken.address.name]
        for times, seconds in enumerate((100, 200, 250), start=1):
            assert ask_some(http) == {200}, "the other one answers in its place"
            lines = [line for line in caplog.messages if "because they keep failing" in line]
            assert (len(lines), f"gets no requests for {seconds} s" in lines[-1]) == (times, True)
            labels = {"replica": str(out.number)}
            assert made.metrics.registry.get_sample_value("oaiserve_gateway_ejected_total", labels) == times
            assert broken.num_asked == watch.MOST_FAILURES + times - 1
            place.world.settle(seconds - 2)
            assert out.name in made.watch.silent
            place.world.settle(8)
            assert out.name not in made.watch.silent
        broken.answer = GOOD
        assert ask_some(http) == {200}
        assert out.num_pauses == 0


def test_of_replicas_that_all_fail_half_are_left_out(place: Place, two: tuple[RawReplica, RawReplica]) -> None:
    for replica in two:
        replica.answer = b"SMTP 220 hello\r\n"
    with gateway_before(place, [one.address for one in two], quick(pause_seconds=1000)) as (made, http):
        assert ask_some(http) == {502}
        assert len(made.watch.silent) == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_request_at_which_all_replicas_fail_puts_none_out(
    place: Place, two: tuple[RawReplica, RawReplica], number: int
) -> None:
    with gateway_before(place, [one.address for one in two[:number]], quick(pause_seconds=1000)) as (made, http):
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
    place: Place, two: tuple[RawReplica, RawReplica]
) -> None:
    two[0].answer = BROKEN
    two[1].answer = BROKEN.replace(b"500", b"404")
    with gateway_before(place, [one.address for one in two]) as (made, http):
        sessions = [{"x-session-id": f"{number}"} for number in range(40)]
        answers = [http.post("/v1/completions", json={"prompt": "Hello"}, headers=session) for session in sessions]
        assert {answer.status_code for answer in answers} == {404, 500}
        assert not any(one.num_failures for one in made.watch.upstreams.values())


def test_the_answer_that_is_not_passed_on_is_not_held(place: Place, two: tuple[RawReplica, RawReplica]) -> None:
    endless = b"HTTP/1.1 %d No\r\ntransfer-encoding: chunked\r\n\r\n"
    with gateway_before(place, [one.address for one in two]) as (made, http):
        for status in (500, 503, 429):
            two[0].answer = endless % status
            assert ask_some(http, 8) == {200}
        bad = made.watch.upstreams[two[0].address.name]
        place.world.settle()
        assert not bad.connections - {*bad.idle}


def test_no_reports_are_logged_once(
    place: Place, two: tuple[RawReplica, RawReplica], caplog: pytest.LogCaptureFixture
) -> None:
    with gateway_before(place, [two[0].address]) as (made, _):
        for status in (b"503", b"200", b"503"):
            two[0].ready_status = status
            place.world.settle(1)
            assert made.is_ready is (status == b"200")
    assert sum("gives no reports" in line for line in caplog.messages) == 1
