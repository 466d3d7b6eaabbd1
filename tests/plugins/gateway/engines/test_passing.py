"""What passes between clients and engines of other kinds: every byte, and nothing else."""

import gzip
import json
from http.client import HTTPResponse

import pytest

from oaiserve.plugins.gateway.engines import relay
from tests.plugins.gateway.engines.doubles import (
    ASK,
    CHAT,
    CUT,
    DONE,
    STREAM,
    RawEngine,
    before,
    body_of,
    event,
    piece,
    stream,
    whole,
)
from tests.world.serving import Place

ODD_BODY = b'{ "messages":[ {"role":"user","content":"\\u00e9\\ud83d"} ],\n\t"x": 1e2, "stream" :false ,"model": 7}'


def test_a_body_and_its_answer_pass_byte_for_byte(place: Place) -> None:
    engine = RawEngine(place)
    odd_answer = b'{"choices" : [ ] , "usage":null, "\\u00e9": 1.50}\n'
    engine.answers[CHAT] = whole(odd_answer, more=b"x-own: a\r\nx-own: b\r\nset-cookie: c\r\n")
    with before(place, engine) as front:
        headers = {"content-type": "application/json", "x-mine": "yes", "x-request-id": "known"}
        got = front.http.post(f"{CHAT}?a=b%20c", content=ODD_BODY, headers=headers)
    assert got.content == odd_answer
    assert got.headers.get_list("x-own") == ["a", "b"]
    assert (got.headers["set-cookie"], got.headers["x-request-id"]) == ("c", "known")
    asked = engine.questions()[0]
    assert asked.body == ODD_BODY
    assert asked.line == f"POST {CHAT}?a=b%20c HTTP/1.1"
    assert (asked.headers["x-mine"], asked.headers["x-request-id"]) == ("yes", "known")


def test_headers_that_the_gateway_writes_itself_come_once(place: Place) -> None:
    engine = RawEngine(place)
    page = b'link: <../../requests/its-own>; rel="describedby"; type="text/html"\r\n'
    other = b'link: <https://engine.example/docs>; rel="help"\r\n'
    engine.answers[CHAT] = whole({}, more=page + other + b"x-content-type-options: nosniff\r\n")
    with before(place, engine) as front:
        got = front.chat(headers={"x-request-id": "known"})
    assert got.headers.get_list("x-content-type-options") == ["nosniff"]
    assert [link.partition(">")[0] for link in got.headers.get_list("link")] == [
        "<https://engine.example/docs",
        "<../../requests/known",
    ]


def test_a_coded_body_and_a_coded_answer_stay_coded(place: Place) -> None:
    engine = RawEngine(place)
    packed = gzip.compress(b'{"choices": []}')
    engine.answers[CHAT] = whole(packed, more=b"content-encoding: gzip\r\n")
    with before(place, engine) as front:
        headers = {"content-type": "application/json", "content-encoding": "gzip", "x-request-id": "coded"}
        with front.http.stream("POST", CHAT, content=gzip.compress(ODD_BODY), headers=headers) as got:
            assert b"".join(got.iter_raw()) == packed
        account = front.account("coded")
    assert gzip.decompress(engine.questions()[0].body) == ODD_BODY
    assert account["routing"]["unread"] == "it has a content coding"


@pytest.mark.parametrize(
    ("answer", "unread"),
    [
        (STREAM, ""),
        (stream(b": ping\n\n", piece("Hi"), b": another\r\n\r\n", b"event: x\r\nid: 4\r\n", DONE), ""),
        (stream(*[bytes([byte]) for byte in piece("One byte at a time") + DONE]), ""),
        (stream(piece("no usage and no end")), ""),
        (stream(event({"choices": [{"index": "x", "delta": "text"}, 7], "usage": [1], "timings": "none"}), DONE), ""),
        (stream(event({"error": {"message": "out of memory", "code": 500}}), DONE), ""),
        (stream(b"data: {broken\n\n", piece("Hi"), DONE), "it is no JSON object"),
        (stream(b"data: [1, 2]\n\n", DONE), "it is no JSON object"),
        (stream(b"\xff\xfe\n\ndata: \xff\n\n"), "it is no JSON object"),
        (stream(b"<html>busy</html>", kind=b"text/html"), "its type is text/html"),
        (stream(b"", kind=b"application/json"), ""),
        (stream(b'{"a": 1}{"b": 2}', kind=b"application/json"), "it is no JSON object"),
    ],
    ids=[
        *("a stream", "comments", "single bytes", "no usage", "strange values", "an error as a 200", "broken JSON"),
        *("an array", "no UTF-8", "HTML", "nothing", "two objects"),
    ],
)
def test_what_an_engine_says_strangely_passes_and_counts_as_unread(
    place: Place, answer: list[bytes], unread: str
) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = answer
    with before(place, engine) as front:
        got = front.chat(body={"stream": True}, headers={"x-request-id": "strange"})
        account = front.account("strange")
        num_unread = front.metric("oaiserve_engine_unread_answers_total", 'engine="1"')
    assert got.content == body_of(answer)
    assert account["routing"].get("unread", "") == unread
    assert num_unread == bool(unread)


@pytest.mark.parametrize(
    "status", [b"400 Bad Request", b"404 Not Found", b"418 Teapot", b"429 Slow", b"500 Oh", b"503 No"]
)
def test_an_error_of_the_only_engine_passes_as_it_is(place: Place, status: bytes) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = whole(b'{"detail": "own words"}', status, more=b"retry-after: 7\r\n")
    with before(place, engine) as front:
        got = front.chat(headers={"x-request-id": "wrong"})
        account = front.account("wrong")
    assert (got.status_code, got.content) == (int(status[:3]), b'{"detail": "own words"}')
    assert got.headers["retry-after"] == "7"
    assert account["outcome"] == ("failed" if status in (b"500 Oh",) else "rejected")


def test_paths_without_an_account_pass_too(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers |= {"/props": whole({"total_slots": 4}), "/slots/0": whole(b"erased", kind=b"text/plain")}
    with before(place, engine) as front:
        assert front.http.get("/props").json() == {"total_slots": 4}
        assert front.http.head("/props").headers["content-length"] == "18"
        assert front.http.request("POST", "/slots/0?action=erase", content=b"x").text == "erased"
        assert front.http.get("/nothing").text == "no such path"
        assert front.http.get("/docs").text == "no such path"  # It would describe an API of ours.
        assert front.http.get("/v1/models").content == engine.answers["/v1/models"][0].split(b"\r\n\r\n")[1]


@pytest.mark.parametrize(
    ("parts", "ending"),
    [([piece("Hel")], b""), ([piece("Hel")[:-1], b""], b"\n\n"), ([piece("Hel"), b'data: {"cho'], b"\n\n")],
    ids=["after an event", "within its end", "within an event"],
)
def test_a_stream_that_breaks_off_ends_with_an_error_and_is_not_continued(
    place: Place, parts: list[bytes], ending: bytes
) -> None:
    engines = RawEngine(place), RawEngine(place)
    parts = [part for part in parts if part]
    for engine in engines:
        engine.answers[CHAT] = stream(*parts, CUT)
    with before(place, *engines) as front:
        got = front.chat(body={"stream": True}, headers={"x-request-id": "cut"})
        account = front.account("cut")
    sent = b"".join(parts) + ending
    assert got.content.startswith(sent)
    error, done, rest = got.content.removeprefix(sent).split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == relay.BROKEN_OFF
    assert (done, rest) == (b"data: [DONE]", b"")
    assert sum(len(engine.questions()) for engine in engines) == 1
    assert (account["outcome"], account["error_type"]) == ("failed", "BadGateway")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_an_answer_that_ends_with_its_connection_is_whole(place: Place, version: bytes) -> None:
    engine = RawEngine(place)
    head = b"HTTP/%b 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" % version
    engine.answers[CHAT] = [head, piece("Hel"), 0.1, piece("lo"), CUT]
    with before(place, engine) as front:
        got = front.chat(body={"stream": True}, headers={"x-request-id": "old"})
        account = front.account("old")
    assert got.content == piece("Hel") + piece("lo")
    assert account["outcome"] == "finished"


def test_a_stream_of_lines_that_breaks_off_ends_with_a_line(place: Place) -> None:
    engine = RawEngine(place)
    lines = b'{"message": {"content": "Hel"}, "done": false}\n{"mess'
    engine.answers["/api/chat"] = stream(lines, CUT, kind=b"application/x-ndjson")
    with before(place, engine) as front:
        got = front.http.post("/api/chat", json=ASK)
    assert got.content == lines + b'\n{"error":"' + relay.BROKEN_OFF.encode() + b'"}\n'


def test_an_answer_that_breaks_off_cuts_the_connection(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{", CUT]
    with before(place, engine) as front:
        with pytest.raises(Exception, match="peer closed|disconnected|reset"):
            front.chat(headers={"x-request-id": "cut"})
        assert front.account("cut")["outcome"] == "failed"


def test_a_request_moves_on_only_while_nothing_was_sent(place: Place) -> None:
    engines = RawEngine(place), RawEngine(place)
    with before(place, *engines) as front:
        for engine in engines:
            engine.answers[CHAT] = whole(b"{}", b"503 Busy")
        engines[1].answers[CHAT] = whole({"choices": [], "from": 2})
        answers = {front.chat().content for _ in range(4)}
        assert answers == {b'{"choices": [], "from": 2}'}
        assert [engine.num_open for engine in front.fleet.engines] == [0, 0]
        engines[1].kill()
        got = front.chat(headers={"x-request-id": "moved"})
        assert (got.status_code, got.content) == (503, b"{}")  # the answer of the only one that is there
        engines[0].kill()
        got = front.chat(headers={"x-request-id": "nobody"})
        assert (got.status_code, got.json()["error"]["code"]) == (503, "service_unavailable")
        assert not front.http.get("/ready").is_success
        engines[0].start()
        front.settle(3)
        assert front.http.get("/ready").is_success
        front.account("moved")
        front.account("nobody")


def test_an_engine_that_dies_before_its_answer_is_left_for_another(place: Place) -> None:
    engines = RawEngine(place), RawEngine(place)
    for engine in engines:
        engine.answers[CHAT] = [CUT]
    with before(place, *engines) as front:
        assert front.chat().status_code == 503
        assert all(engine.questions() for engine in engines)
        front.settle(3)
        engines[1].answers[CHAT] = whole({"choices": []})
        assert front.chat().status_code == front.chat().status_code == 200


def test_a_client_that_leaves_ends_its_request_at_the_engine(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = stream(piece("Hel"), *[0.5, piece("lo")] * 20, DONE)
    with before(place, engine) as front:
        body = json.dumps({**ASK, "stream": True}).encode()
        head = b"POST %b HTTP/1.1\r\nx-request-id: gone\r\ncontent-type: application/json\r\n"
        with front.server.connect() as client:
            client.sendall(head % CHAT.encode() + b"host: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert client.recv(10_000)
        front.settle(3)
        assert engine.num_left == 1
        assert front.account("gone")["outcome"] == "cancelled"


def test_a_client_that_reads_late_gets_every_byte(place: Place) -> None:
    engine = RawEngine(place)
    parts = [piece(f"{number} " + "a" * 10_000) for number in range(200)]
    engine.answers[CHAT] = stream(*parts[:100], 0.5, *parts[100:], DONE)
    body = json.dumps({**ASK, "stream": True}).encode()
    head = b"POST %b HTTP/%b\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with before(place, engine) as front:
        for version in (b"1.0", b"1.1"):  # The answer has chunks only in the second one.
            with front.server.connect() as client:
                client.sendall(head % (CHAT.encode(), version, len(body)) + body)
                client.stop_reading()
                front.settle(2)
                answer = HTTPResponse(client)  # type: ignore[arg-type]
                answer.begin()
                assert answer.read() == b"".join(parts) + DONE


def test_an_answer_that_is_no_http_is_a_502(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = [b"SMTP 220 hello\r\n"]
    with before(place, engine) as front:
        got = front.chat()
    assert (got.status_code, got.json()["error"]["code"]) == (502, "bad_gateway")


def test_a_gateway_before_itself_ends_the_loop(place: Place) -> None:
    engine = RawEngine(place)
    with before(place, engine) as front:
        front.fleet.engines[0].url = front.server.url
        front.fleet.engines[0].close()
        assert front.chat().json()["error"]["code"] == "loop_detected"


def test_no_key_gets_to_where_it_does_not_belong(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = whole({"choices": []})
    with before(place, engine, engine_key="engines-own", api_key=("clients-own",)) as front:
        assert front.chat().status_code == 401
        headers = {"authorization": "Bearer clients-own", "x-api-key": "clients-own", "api-key": "clients-own"}
        assert front.chat(headers=headers).status_code == 200
        engine.answers[CHAT] = whole(b"Incorrect API key: engines-own", b"401 No")
        refused = front.chat(headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "bad_gateway")
    assert "engines-own" not in refused.text + str(refused.headers)
    assert engine.questions()[0].headers["authorization"] == "Bearer engines-own"
    assert engine.asked[0].headers["authorization"] == "Bearer engines-own"  # the gateway's own questions
    assert "clients-own" not in str(engine.asked)


def test_keys_of_ours_stay_here_also_before_an_engine_without_one(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = whole({"choices": []})
    with before(place, engine, api_key=("clients-own",)) as front:
        front.chat(headers={"authorization": "Bearer clients-own", "x-request-id": "named"})
        listed = front.listed(authorization="Bearer clients-own")
    assert "clients-own" not in str(engine.asked)
    assert listed[0]["client"] == "key-1"


def test_without_keys_of_the_gateway_clients_have_those_of_the_engine(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = whole(b"wrong key", b"401 No")
    with before(place, engine) as front:
        got = front.chat(headers={"authorization": "Bearer theirs"})
    assert (got.status_code, got.text) == (401, "wrong key")
    assert engine.questions()[0].headers["authorization"] == "Bearer theirs"


def test_the_key_of_the_engine_replaces_those_of_clients(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = whole({"choices": []})
    with before(place, engine, engine_key="engines-own") as front:
        assert front.chat(headers={"authorization": "Bearer theirs", "x-api-key": "theirs"}).status_code == 200
    assert engine.questions()[0].headers["authorization"] == "Bearer engines-own"
    assert "theirs" not in str(engine.asked)
