"""Replicas whose reports, lists and streams lie, and gateways that lead back to themselves: sound replicas go on."""

import base64
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import repeat
from typing import Any

import httpx
import pytest

from oaiserve.plugins.gateway import gateway, lists, sent_pieces, upstream, watch
from oaiserve.plugins.gateway.address import Address
from oaiserve.wire.continuation import Piece, mark
from oaiserve.wire.report import MOST_REPORT_BYTES
from tests.plugins.gateway.doubles import BROKEN, GOOD, RawReplica, gateway_before
from tests.world.network import MOST_READ_BYTES
from tests.world.serving import Place

MOST_IN_FLIGHT_BYTES = 4 * MOST_READ_BYTES  # in sockets and event loops of both sides
Content = bytes | Iterable[bytes]
REPORT: dict[str, Any] = {
    "incarnation": "a",
    "number": 1,
    "num_open": 0,
    "waiting_tokens": 0,
    "keys": "",
    "num_running": 0,
    "num_waiting": 0,
    "kv_use": 0,
    "is_ready": True,
    "models": ["m"],
}
DEEP = b"[" * 200_000 + b"]" * 200_000


def page(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)


def as_page(content: Any) -> bytes:
    return page(json.dumps(content).encode())


def endless(part: bytes, head: bytes = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n") -> Iterable[bytes]:
    """Return an answer without an end, of which nobody should read 64 MiB. It may be sent any number of times."""

    class Parts:
        def __iter__(self) -> Iterator[bytes]:
            yield head
            yield from repeat(b"%x\r\n%b\r\n" % (len(part), part), 2**26 // len(part))

    return Parts()


@pytest.fixture
def replicas(place: Place) -> Iterator[tuple[RawReplica, RawReplica]]:
    found = RawReplica(place), RawReplica(place)
    yield found
    for replica in found:
        replica.close()


BAD_REPORTS: dict[str, Content] = {
    "endless": endless(b" " * 65536),
    "no JSON": page(b"{"),
    "a list": as_page([]),
    "deep": page(b'{"x": ' + DEEP + b"}"),
    "300,000 models": as_page(REPORT | {"models": [f"{number}" for number in range(300_000)]}),
    "2,000 models": as_page(REPORT | {"models": [f"{number}" for number in range(2000)]}),
    "a long name": as_page(REPORT | {"models": ["a" * 10_000]}),
    "100,000 keys": as_page(REPORT | {"keys": base64.b64encode(bytes(800_000)).decode()}),
    "half a key": as_page(REPORT | {"keys": "AAAA"}),
    "a load below 0": as_page(REPORT | {"num_open": -1e9}),
    "a huge load": as_page(REPORT | {"waiting_tokens": 1e308}),
    "endless steps": as_page(REPORT | {"step_seconds": 1e300}),
    **{f"{name} as an object": as_page(REPORT | {name: {"a": []}}) for name in REPORT},
}


@pytest.mark.parametrize("bad", BAD_REPORTS.values(), ids=BAD_REPORTS)
def test_report_that_cannot_be_read_counts_as_none(
    place: Place, replicas: tuple[RawReplica, RawReplica], bad: Content, caplog: pytest.LogCaptureFixture
) -> None:
    liar, sound = replicas
    liar.answers[b"/debug/report"] = bad
    sound.answers[b"/debug/report"] = as_page(REPORT)
    with gateway_before(place, [liar.address, sound.address]) as (made, http):
        place.world.settle(1)
        assert liar.num_reports > 4
        upstreams = made.watch.upstreams
        assert upstreams[sound.address.name].report is not None
        assert upstreams[liar.address.name].report is None
        answers = {http.post("/v1/completions", json={"prompt": f"{number}"}).text for number in range(20)}
        assert answers == {"good"}
        assert liar.num_asked > 0, "it serves, though nobody knows its load"
    assert sum("they cannot be read" in line for line in caplog.messages) == 1
    assert not [record for record in caplog.records if record.exc_info]
    assert liar.num_sent_bytes < MOST_REPORT_BYTES + MOST_IN_FLIGHT_BYTES


def test_replica_keeps_its_models_while_its_reports_cannot_be_read(
    place: Place, replicas: tuple[RawReplica, RawReplica]
) -> None:
    one, other = replicas
    one.answers[b"/debug/report"] = as_page(REPORT | {"models": ["a"], "aliases": ["a.gguf"]})
    other.answers[b"/debug/report"] = as_page(REPORT | {"models": ["b"]})
    with gateway_before(place, [one.address, other.address]) as (made, http):
        assert made.router.differ
        one.answers[b"/debug/report"] = as_page(REPORT | {"models": ["a"], "aliases": ["a.gguf"], "step_seconds": 1e7})
        watched = made.watch.upstreams[one.address.name]
        place.world.settle(1)
        assert watched.report is None
        num_before = other.num_asked
        for number in range(10):
            for name in ("a", "a.gguf"):
                assert http.post("/v1/completions", json={"model": name, "prompt": f"{number}"}).text == "good"
        assert other.num_asked == num_before, "it has another model"
        one.answers[b"/debug/report"] = as_page(REPORT | {"models": ["a"], "number": 2})
        place.world.settle(watch.MUTE_SECONDS)
        assert watched.report is not None


GOOD_ITEM = {"id": "file-good", "created_at": 5, "object": "file"}
ODD_ITEMS: list[Any] = [
    *({"id": odd, "created_at": 9} for odd in (5, None, [], {}, "", "a" * 5000)),
    *({"id": "odd", "created_at": odd} for odd in (None, "9", [1], {}, 1e99, 10**30)),
    *(5, None, "text", [], {}),
]
BAD_LISTS: dict[str, Content] = {
    "endless": endless(b" " * 65536),
    "endless items": endless(b'{"id": "a", "created_at": 1},' * 1000),
    "no JSON": page(b"{"),
    "another form": as_page({"data": {}}),
    "has_more as text": as_page({"data": [], "has_more": "yes"}),
    "deep": page(b'{"data": [' + DEEP + b"]}"),
    "100,000 items": as_page({"data": [{"id": "a", "created_at": 1}] * 100_000}),
    "not found": BROKEN.replace(b"500", b"404"),
    "moved": BROKEN.replace(b"500", b"302"),
}


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
@pytest.mark.parametrize("bad", BAD_LISTS.values(), ids=BAD_LISTS)
def test_list_of_a_liar_leaves_those_of_the_others(
    place: Place, replicas: tuple[RawReplica, RawReplica], path: str, bad: Content
) -> None:
    liar, sound = replicas
    liar.answers[b"/v1/"] = bad
    sound.answers[b"/v1/"] = as_page({"data": [*ODD_ITEMS, GOOD_ITEM]})
    with gateway_before(place, [liar.address, sound.address]) as (_, http):
        answer = http.get(path)
    assert (answer.status_code, answer.json()["data"]) == (200, [GOOD_ITEM])
    assert liar.num_sent_bytes < lists.MOST_LIST_BYTES + MOST_IN_FLIGHT_BYTES


def test_list_without_an_end_is_read_for_some_pages(place: Place, replicas: tuple[RawReplica, RawReplica]) -> None:
    liar, _ = replicas
    liar.answers[b"/v1/"] = as_page({"data": [{**GOOD_ITEM, "padding": "a" * 1000}], "has_more": True})
    with gateway_before(place, [liar.address]) as (_, http):
        assert http.get("/v1/files").json()["data"][0]["id"] == "file-good"
    assert liar.num_asked == lists.MOST_PAGES


def test_silent_list_is_given_up(place: Place, replicas: tuple[RawReplica, RawReplica]) -> None:
    liar, sound = replicas
    liar.answers[b"/v1/"] = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n["
    sound.answers[b"/v1/"] = as_page({"data": [GOOD_ITEM]})
    with gateway_before(place, [liar.address, sound.address]) as (_, http):
        assert http.get("/v1/files").json()["data"] == [GOOD_ITEM]


ODD_MODELS: list[Any] = [
    *({"id": odd} for odd in (5, None, [], "")),
    *({"id": "odd", "created": odd} for odd in (None, "9", [], -1, 10**18)),
    *(5, None, []),
]


@pytest.mark.parametrize("api", [{}, {"anthropic-version": "2023-06-01"}], ids=["OpenAI", "Anthropic"])
def test_odd_models_are_left_out(place: Place, replicas: tuple[RawReplica, RawReplica], api: dict[str, str]) -> None:
    liar, sound = replicas
    nested = {"id": "deep", "details": json.loads("[" * 60 + "]" * 60)}
    for replica, models in ((liar, [*ODD_MODELS, nested]), (sound, [{"id": "m", "created": 3}])):
        replica.answers[b"/debug/report"] = as_page(REPORT | {"models": [replica.address.name]})
        replica.answers[b"/v1/models"] = as_page({"data": models})
    with gateway_before(place, [liar.address, sound.address]) as (made, http):
        assert made.router.differ
        answer = http.get("/v1/models", headers=api)
        liar.answers[b"/v1/models"] = BROKEN
        without = http.get("/v1/models", headers=api)
        sound.answers[b"/v1/models"] = BROKEN
        refused = http.get("/v1/models", headers=api)
    assert sorted(one["id"] for one in answer.json()["data"]) == ["deep", "m"]
    assert [one["id"] for one in without.json()["data"]] == ["m"]
    assert refused.status_code == 500


STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-oaiserve-kind: k\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def test_marks_without_an_end_are_forgotten(
    place: Place, replicas: tuple[RawReplica, RawReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_pieces, "MOST_SENT_BYTES", 100)
    liar, _ = replicas
    event = b"data: a\n\n" + mark(Piece(0, [1, 2, 3]))
    whole = STREAM + chunk(event) * 100
    with gateway_before(place, [liar.address]) as (made, http):
        liar.answer = whole + b"0\r\n\r\n"
        asked = {"prompt": "Hi", "stream": True}
        assert http.post("/v1/completions", json=asked).text == "data: a\n\n" * 100
        liar.answer = whole + b"no chunk"
        cut = http.post("/v1/completions", json=asked).text
        assert cut.startswith("data: a\n\n" * 100)
        assert "service_unavailable" in cut, "it can't go on elsewhere without its pieces"
        assert made.kept.total == 0


def test_marks_without_an_end_take_turns(
    place: Place, replicas: tuple[RawReplica, RawReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "LARGE_PARTS_BYTES_PER_SECOND", 1)  # the first of them waits for hours
    liar, _ = replicas
    liar.answers[b"/v1/flood"] = endless(mark(Piece(0, [1])) * 10_000, STREAM)
    with gateway_before(place, [liar.address]) as (made, http):
        upstream_of_liar = made.watch.upstreams[liar.address.name]
        with http.stream("GET", "/v1/flood"):
            place.world.settle(1)
            assert upstream_of_liar.turns.locked()
            assert [http.get("/health").status_code for _ in range(9)] == [200] * 9
        assert liar.num_sent_bytes < MOST_IN_FLIGHT_BYTES


@pytest.mark.parametrize("end", [b"0\r\n" + b"a: b\r\n" * 100_000, b"1;a=" + b"b" * 600_000])
def test_endless_trailers_end_an_answer(place: Place, replicas: tuple[RawReplica, RawReplica], end: bytes) -> None:
    liar, _ = replicas
    liar.answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"good") + end
    with gateway_before(place, [liar.address]) as (_, http), pytest.raises(httpx.ReadError):
        http.post("/v1/completions", json={"prompt": "Hi"})


@pytest.mark.parametrize("status", [204, 304])
def test_length_of_an_answer_without_a_body_is_dropped(
    place: Place, replicas: tuple[RawReplica, RawReplica], status: int
) -> None:
    liar, _ = replicas
    liar.answer = GOOD.replace(b"200", b"%d" % status).removesuffix(b"good")
    with gateway_before(place, [liar.address]) as (_, http):
        assert [http.get("/v1/other").status_code for _ in range(3)] == [status] * 3


def test_request_passes_few_gateways_and_no_circle(
    place: Place, replicas: tuple[RawReplica, RawReplica], caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = replicas
    address = first.address
    clients = []
    with ExitStack() as stack:
        for _ in range(gateway.MOST_HOPS + 1):
            _, http = stack.enter_context(gateway_before(place, [address]))
            address = address_of_gateway(http)
            clients.append(http)
        asked = {"prompt": "Hello"}
        assert clients[-2].post("/v1/completions", json=asked).text == "good"
        refused = [clients[-1].post("/v1/completions", json=asked) for _ in range(5)]
    assert {answer.status_code for answer in refused} == {508}
    assert refused[0].json()["error"]["code"] == "loop_detected"
    assert first.num_asked == 1
    assert sum("has passed 4 gateways" in line for line in caplog.messages) == 1


def test_gateway_that_is_its_own_replica_refuses_at_last(place: Place, replicas: tuple[RawReplica, RawReplica]) -> None:
    sound, _ = replicas
    listed = [sound.address]
    with gateway_before(place, listed) as (made, http):
        own = address_of_gateway(http)
        listed.append(own)
        place.world.wait_for(lambda: made.watch.joined == {sound.address.name, own.name})
        assert http.post("/v1/completions", json={"prompt": "Hello"}).text == "good"
        made.watch.exclude = lambda *_: None  # nobody notices that the sound one is gone
        listed.remove(sound.address)
        place.world.wait_for(lambda: made.watch.joined == {own.name})
        assert http.post("/v1/completions", json={"prompt": "Hello"}).status_code == 508


def address_of_gateway(http: httpx.Client) -> Address:
    host = http.base_url.host
    port = http.base_url.port or 0
    return Address(host, port, f"{host}:{port}")
