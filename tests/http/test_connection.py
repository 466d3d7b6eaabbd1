"""Attacks the real server with raw sockets: each request gets one answer, and no connection costs much or lasts long.

What the routes answer is tested elsewhere.
"""

import io
import socket
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from urllib.parse import urlsplit

import msgspec
import pytest

from oaiserve.http.connection import MOST_HEAD_BYTES, MOST_HEADERS, MOST_PIPELINED
from oaiserve.http.connections import Refusal
from tests.engine.doubles import TIMEOUT_SECONDS
from tests.routes.doubles import says
from tests.serving import Serve, Served

PATH = "/v1/completions"
BODY = b'{"prompt": "Hi"}'
CHUNKED_BODY = b"4\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:4], len(BODY) - 4, BODY[4:])
CHUNKED = ("transfer-encoding: chunked",)
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
WEBSOCKET = (
    *("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
SHORT_SECONDS = 0.2
SENDING_SECONDS = 1.0  # A client may be late by so much between its connection and its first bytes.


def post(*headers: str, body: bytes = BODY, path: str = PATH) -> bytes:
    """Return a POST. Without a header that frames its body, it gets a content-length."""
    if CHUNKED[0] not in headers and not any(header.lower().startswith("content-length") for header in headers):
        headers = (*headers, f"content-length: {len(body)}")
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers, "", "")
    return "\r\n".join(lines).encode() + body


def get(path: str = "/version", *headers: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", "host: localhost", *headers, "", "")).encode()


LAST = get("/version", "connection: close")


class Client(socket.socket):
    """A connection to the server."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        url = urlsplit(served.url)
        self.settimeout(TIMEOUT_SECONDS)
        self.connect((url.hostname, url.port))
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def answer(self) -> tuple[int, bytes, str | None]:
        """Read one answer, and nothing after it. Return its status, its body and its header `connection`."""
        response = HTTPResponse(Unbuffered(self))  # type: ignore[arg-type]
        response.begin()
        return response.status, response.read(), response.getheader("connection")

    def rest(self) -> bytes:
        """Read until the server closes the connection."""
        return b"".join(iter(lambda: self.recv(65536), b""))

    def statuses(self) -> list[int]:
        """Read answers until the server closes the connection, and return their statuses."""
        received = self.rest()
        statuses = []
        reader = Replay(received)
        while reader.tell() < len(received):
            response = HTTPResponse(reader)  # type: ignore[arg-type]
            response.begin()
            body = response.read()
            assert response.status == 200 or msgspec.json.decode(body)["error"]["message"]
            assert response.headers["x-content-type-options"] == "nosniff"
            statuses.append(response.status)
        return statuses


class Unbuffered:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def makefile(self, mode: str) -> object:
        return self._sock.makefile("rb", buffering=0)


class Replay(io.BytesIO):
    """Bytes that HTTPResponse reads as if they came from a socket, one answer after the other."""

    def makefile(self, mode: str) -> object:
        return self

    def close(self) -> None:
        """Stay open, as the answer that closes it may not be the last one."""


def exchange(served: Served, *segments: bytes) -> list[int]:
    """Send the segments, each after the server has taken the one before, and return the statuses of all answers."""
    with Client(served) as client:
        for segment in segments:
            client.sendall(segment)
            Client(served).close()  # accepted after the segment has arrived
            served.http.get("/version")
        return client.statuses()


def number_submitted(served: Served) -> int:
    return served.engine.submitted.qsize()


# -- requests for another protocol ------------------------------------------------------------------------------------


def cut(request: bytes) -> list[list[bytes]]:
    """Return ways to cut the request into segments."""
    head_end = request.index(b"\r\n\r\n") + 4
    places = [(), (head_end,), (head_end - 2,), (head_end + 3,), (5, head_end + 1), (head_end, head_end + 6)]
    return [
        [request[start:end] for start, end in zip((0, *cuts), (*cuts, len(request)), strict=True)] for cuts in places
    ]


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize(("framing", "body"), [((), BODY), (CHUNKED, CHUNKED_BODY)], ids=["length", "chunked"])
@pytest.mark.parametrize("way", range(6))
def test_a_request_for_another_protocol_gets_one_plain_answer_and_keeps_its_body(
    upgrade: tuple[str, ...], framing: tuple[str, ...], body: bytes, way: int, served: Served
) -> None:
    segments = cut(post(*upgrade, *framing, body=body))[way]
    assert exchange(served, *segments, LAST) == [200, 200]
    assert number_submitted(served) == 1


@pytest.mark.parametrize("headers", [(), CHUNKED], ids=["length", "chunked"])
def test_a_request_in_the_body_of_an_upgrade_is_no_request(headers: tuple[str, ...], served: Served) -> None:
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED) if headers else SMUGGLED
    head, sent = post(*H2C, *headers, body=body).split(b"\r\n\r\n", 1)
    assert exchange(served, head + b"\r\n\r\n", sent, LAST) == [400, 200]
    assert exchange(served, head + b"\r\n\r\n" + sent + LAST) == [400, 200]


# -- broken HTTP ------------------------------------------------------------------------------------------------------

BROKEN = {
    "both lengths": post(*CHUNKED, "content-length: 3", body=b"0\r\n\r\n" + SMUGGLED),
    "both lengths, the other way round": post("content-length: 3", *CHUNKED, body=b"0\r\n\r\n" + SMUGGLED),
    "two lengths": post("content-length: 3", "content-length: 30", body=b"{} " + SMUGGLED),
    "a list of lengths": post("content-length: 3, 3", body=b"{} " + SMUGGLED),
    "a signed length": post("content-length: +3", body=b"{} " + SMUGGLED),
    "a length in an upgrade and chunks": post(*H2C, "content-length: 3", *CHUNKED, body=b"0\r\n\r\n" + SMUGGLED),
    "an unknown transfer encoding": post("transfer-encoding: xchunked", body=b"0\r\n\r\n" + SMUGGLED),
    "two transfer encodings": post(*CHUNKED, "transfer-encoding: identity", body=b"0\r\n\r\n" + SMUGGLED),
    "another transfer encoding before": post("transfer-encoding: identity", *CHUNKED, body=b"0\r\n\r\n" + SMUGGLED),
    "compressed chunks": post("transfer-encoding: gzip, chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "chunks of chunks": post(*CHUNKED, *CHUNKED, body=b"0\r\n\r\n" + SMUGGLED),
    "a folded header": get("/version", "a: b\r\n transfer-encoding: chunked") + SMUGGLED,
    "a folded transfer encoding": post("transfer-encoding:\r\n chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "line feeds only": b"GET /version HTTP/1.1\nhost: localhost\n\n" + SMUGGLED,
    "a bare line feed": b"GET /version HTTP/1.1\r\nhost: localhost\n\r\n" + SMUGGLED,
    "a bare carriage return": b"GET /version HTTP/1.1\r\nhost: localhost\ra: b\r\n\r\n" + SMUGGLED,
    "a space before the colon": post("content-length : 30", body=SMUGGLED),
    "a null byte": get("/version", "a: b\0c") + SMUGGLED,
    "a chunk size that overflows": post(*CHUNKED, body=b"10000000000000003\r\n{}\r\n0\r\n\r\n" + SMUGGLED),
    "a space after a chunk size": post(*CHUNKED, body=b"2 \r\n{}\r\n0\r\n\r\n" + SMUGGLED),
    "a chunk without end": post(*CHUNKED, body=b"2\r\n{}0\r\n\r\n" + SMUGGLED),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", BROKEN.values(), ids=BROKEN.keys())
def test_broken_http_gets_one_answer_and_the_end(request_bytes: bytes, served: Served) -> None:
    assert exchange(served, request_bytes) == [400]
    assert number_submitted(served) == 0


def test_a_broken_body_does_not_get_a_second_answer(served: Served) -> None:
    with Client(served) as client:
        client.sendall(post(*CHUNKED, body=b"", path="/nothing"))
        assert client.answer()[0] == 404
        client.sendall(b"nothing\r\n" + SMUGGLED)
        assert client.recv(1) == b""


ANSWERS = {  # to segments: their statuses, and how many requests reach the engine
    "upgrades may be pipelined": ([post(*H2C) * 3 + get("/version", *WEBSOCKET) + post() + LAST], [200] * 6, 4),
    "a websocket handshake is plain HTTP": ([get("/v1/realtime", *WEBSOCKET), LAST], [404, 200], 0),
    "CONNECT is refused": ([b"CONNECT x:443 HTTP/1.1\r\nhost: localhost\r\n\r\n" + SMUGGLED], [405], 0),
    "what is broken is answered in its turn": ([post() + get() + b"nothing\r\n\r\n" + SMUGGLED], [200, 200, 400], 1),
    "so is a broken body": ([get() + post(*CHUNKED, body=b"2\r\n{}nothing\r\n" + SMUGGLED)], [200, 400], 0),
    "few may wait": ([get() * MOST_PIPELINED + LAST], [200] * (MOST_PIPELINED + 1), 0),
    "of too many none waits": ([get() * (2 * MOST_PIPELINED)], [200, 400], 0),
}


@pytest.mark.parametrize(("segments", "statuses", "number"), ANSWERS.values(), ids=ANSWERS.keys())
def test_requests_on_one_connection_are_answered_in_turn(
    segments: list[bytes], statuses: list[int], number: int, served: Served
) -> None:
    assert exchange(served, *segments) == statuses
    assert number_submitted(served) == number


def test_a_pipelining_client_that_leaves_has_its_running_request_aborted(served: Served) -> None:
    served.engine.script = lambda request: ()
    with Client(served) as client:
        client.sendall(post() + get())
        request = served.engine.submitted.get()
    assert served.engine.aborted.get() == request.request_id


# -- headers without end ----------------------------------------------------------------------------------------------


def of_bytes(number: int) -> bytes:
    """Return a request whose URL and headers have this number of bytes."""
    own = len("/version") + len("hostlocalhost") + len("connectionclose") + len("a")
    return get("/version", "connection: close", "a: " + "b" * (number - own))


def test_headers_of_the_largest_size_and_number_are_accepted(served: Served) -> None:
    assert exchange(served, of_bytes(MOST_HEAD_BYTES)) == [200]
    headers = ["a: b"] * (MOST_HEADERS - 2)
    assert exchange(served, get("/version", "connection: close", *headers)) == [200]


TOO_LARGE = {
    "one byte too many": of_bytes(MOST_HEAD_BYTES + 1),
    "one header too many": get("/version", *["a: b"] * MOST_HEADERS),
    "many headers": get("/version", *["a: b"] * 20_000),
    "a long URL": get("/" + "a" * MOST_HEAD_BYTES),
    "a header without end": b"GET /version HTTP/1.1\r\na: " + b"b" * 4 * MOST_HEAD_BYTES,
    "a name without end": b"GET /version HTTP/1.1\r\n" + b"b" * 4 * MOST_HEAD_BYTES,
    "an upgrade": get("/version", *H2C, *["a: b"] * MOST_HEADERS),
    "a trailer without end": post(*CHUNKED, body=b"0\r\na: " + b"b" * 4 * MOST_HEAD_BYTES),
    "many trailers": post(*CHUNKED, body=b"0\r\n" + b"a: b\r\n" * 1000 + b"\r\n"),
    "a chunk extension without end": post(*CHUNKED, body=b"2;" + b"a" * 4 * MOST_HEAD_BYTES),
}


@pytest.mark.parametrize("request_bytes", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_headers_that_are_too_large_get_431(request_bytes: bytes, served: Served) -> None:
    assert exchange(served, request_bytes) == [431]


def test_a_header_without_end_is_cut_while_it_comes(served: Served) -> None:
    with Client(served) as client:
        client.sendall(b"GET /version HTTP/1.1\r\na: ")
        for _ in range(4 * MOST_HEAD_BYTES // 1024):
            client.sendall(b"b" * 1024)
        assert client.statuses() == [431]


def test_a_trailer_is_no_header(served: Served, serve: Serve) -> None:
    guarded = serve(api_key=("secret",))
    body = CHUNKED_BODY[:-2] + b"authorization: Bearer secret\r\n\r\n"
    assert exchange(guarded, post(*CHUNKED, body=body) + LAST)[0] == 401
    assert exchange(served, post(*CHUNKED, body=body) + LAST) == [200, 200]


# -- silence ----------------------------------------------------------------------------------------------------------


def test_half_a_head_gets_408_and_dribbling_does_not_help(serve: Serve) -> None:
    impatient = serve(header_timeout_seconds=SENDING_SECONDS)
    with Client(impatient) as client:
        client.settimeout(SENDING_SECONDS / 20)
        received = b""
        sent = b"GET /version HTTP/1.1\r\na: "
        while not received:  # a byte now and then, until the server has had enough
            client.sendall(sent)
            sent = b"b"
            try:
                received = client.recv(65536)
            except TimeoutError:
                continue
    assert received.startswith(b"HTTP/1.1 408 ")


def test_a_silent_connection_is_closed_without_words(serve: Serve) -> None:
    for sent in (b"", b"\r\n\r\n"):
        with Client(serve(header_timeout_seconds=SHORT_SECONDS)) as client:
            client.sendall(sent)
            assert client.recv(1) == b""


def test_an_idle_connection_is_closed_without_words(serve: Serve) -> None:
    with Client(serve(idle_timeout_seconds=SHORT_SECONDS)) as client:
        client.sendall(get() * 2)
        assert [client.answer()[0] for _ in range(2)] == [200, 200]
        assert client.recv(1) == b""


def test_half_a_second_head_gets_408(serve: Serve) -> None:
    with Client(serve(header_timeout_seconds=SENDING_SECONDS)) as client:
        client.sendall(get() + b"G")
        assert client.statuses() == [200, 408]


def test_no_timer_runs_while_an_answer_does(serve: Serve) -> None:
    """The server may take longer to answer than a client may take to ask."""
    served = serve(header_timeout_seconds=SENDING_SECONDS, idle_timeout_seconds=SHORT_SECONDS)
    served.engine.script = lambda request: ()
    with Client(served) as client:
        client.sendall(post())
        request = served.engine.submitted.get()
        with Client(served) as silent:
            assert silent.recv(1) == b""  # the timeout is over
        served.engine.script = says("Hi")
        for events in served.engine.script(request):
            served.engine.deliver(events)
        assert client.answer()[0] == 200


# -- answers before the end of the body -------------------------------------------------------------------------------


def test_an_answer_before_the_end_of_the_body_is_the_last_one_and_says_so(served: Served) -> None:
    size = 100_000
    with Client(served) as client:
        client.sendall(post(f"content-length: {size}", body=b"", path="/nothing"))
        status, _, connection = client.answer()
        assert (status, connection) == (404, "close")
        client.sendall((SMUGGLED * size)[:size] + LAST)
        assert client.statuses() == []


def test_after_an_answer_that_needed_no_body_the_connection_goes_on(served: Served) -> None:
    with Client(served) as client:
        client.sendall(post("content-length: 4", body=b"1234", path="/nothing"))
        status, _, connection = client.answer()
        assert (status, connection) == (404, None)
        client.sendall(LAST)
        assert client.statuses() == [200]


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_a_client_that_sends_a_body_without_end_can_read_its_answer(connection: str, served: Served) -> None:
    with Client(served) as client:
        client.sendall(post(f"connection: {connection}", "content-length: 1000000000", body=b""))
        client.sendall(b" " * 2**22)
        assert client.statuses() == [413]


def test_a_body_that_was_not_asked_for_is_not_waited_for(served: Served) -> None:
    with Client(served) as client:
        size = served.engine.max_model_len * 10**6
        client.sendall(post("expect: 100-continue", f"content-length: {size}", body=b""))
        assert client.statuses() == [413]


def test_a_rest_that_does_not_come_ends_the_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.http.connection.GOODBYE_SECONDS", SHORT_SECONDS)
    with Client(served) as client:
        client.sendall(post("content-length: 10", body=b"", path="/nothing"))
        assert client.statuses() == [404]


# -- HTTP/1.0 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_of_http_1_0_gets_no_chunks_and_reads_to_the_end(stream: bytes, served: Served) -> None:
    served.engine.script = says(*"abc", "d" * 200_000)  # sent without a content-length
    with Client(served) as client:
        request = post("connection: keep-alive", body=b'{"prompt": "Hi", "stream": %b}' % stream)
        client.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = client.rest().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    if stream == b"true":
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert msgspec.json.decode(body)["choices"][0]["text"] == "abc" + "d" * 200_000


# -- too many connections ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_connections": 3}, Refusal.ALL), ({"max_connections_per_address": 3}, Refusal.ADDRESS)],
)
def test_a_connection_too_many_gets_503_and_a_closed_one_makes_room(
    options: dict[str, int], reason: Refusal, serve: Serve
) -> None:
    served = serve(**{"max_connections_per_address": 0, **options})  # a server that only this test uses
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(served)) for _ in range(3)]
        for client in clients:
            client.sendall(get())
            assert client.answer()[0] == 200
        with Client(served) as refused:
            assert refused.statuses() == [503]
        clients.pop().close()
        statuses = [503]
        while statuses == [503]:  # the server sees the end of the connection a moment later
            with Client(served) as late:
                statuses = late.statuses() if not is_open(late) else [200]
        assert statuses == [200]
        for client in clients:
            client.sendall(LAST)
            assert client.statuses() == [200]


def is_open(client: Client) -> bool:
    """Ask, and return whether the server answers instead of refusing the connection."""
    with suppress(OSError):  # a refused connection is closed, and may not take the request
        client.sendall(LAST)
    return client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
