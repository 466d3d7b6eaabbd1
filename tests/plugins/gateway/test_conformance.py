"""What a server refuses, it refuses in the same words behind a gateway: bad bodies, and bytes that are no request."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from oaiserve.config import Config
from oaiserve.plugins.gateway.address import Address
from tests.plugins.gateway.doubles import BEHIND_A_GATEWAY, gateway_before
from tests.routes.test_bad_input import BAD_REQUESTS, BadRequest
from tests.world.serving import Place, serving

Answer = tuple[int, dict[str, str], Any]
# These differ with each request, or say how it was passed on, or whether its body was read.
OF_EACH = {
    "date",
    "x-request-id",
    "link",
    "traceresponse",
    "openai-processing-ms",
    "x-oaiserve-route",
    "content-length",
}
OF_EACH.add("connection")


@pytest.fixture
def both(place: Place) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of a server, and of a gateway in front of it."""
    with serving(place, Config("m", BEHIND_A_GATEWAY)) as served:
        port = int(served.url.rpartition(":")[2])
        address = Address("127.0.0.1", port, f"127.0.0.1:{port}")
        with served.client() as straight, gateway_before(place, [address]) as (_, through):
            yield straight, through


def shown(answer: httpx.Response) -> Answer:
    headers = {name: value for name, value in answer.headers.items() if name not in OF_EACH}
    found = answer.json()
    for name in ("request_id", "trace_id"):
        found["error"].pop(name)
    return answer.status_code, headers, found


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=lambda bad: bad.name)
def test_bad_request_is_refused_alike(both: tuple[httpx.Client, httpx.Client], bad: BadRequest) -> None:
    straight, through = (shown(bad.send(client)) for client in both)
    if bad.status == 413:  # a server without media has a lower limit than a gateway
        through[2]["error"]["message"] = straight[2]["error"]["message"]
    assert through == straight


def exchange(place: Place, client: httpx.Client, content: bytes) -> bytes:
    """Return all that comes back until the connection ends."""
    with place.connect(str(client.base_url)) as sock:
        sock.sendall(content)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def request(line: bytes, *headers: bytes, content: bytes = b"") -> bytes:
    head = [line, b"host: localhost", b"connection: close", *headers]
    return b"\r\n".join([*head, b"", content])


JSON = b"content-type: application/json"
POST = b"POST /v1/completions HTTP/1.1"
HUGE = b"content-length: 10000000000"
RAW = {
    "GET of a star": request(b"GET * HTTP/1.1"),
    "OPTIONS of a star": request(b"OPTIONS * HTTP/1.1"),
    "CONNECT": request(b"CONNECT localhost:80 HTTP/1.1"),
    "an absolute target": request(b"GET http://localhost/nothing HTTP/1.1"),
    "an absolute target without a path": request(b"PUT http://localhost HTTP/1.1"),
    "another scheme": request(b"GET ftp://localhost/nothing HTTP/1.1"),
    "no target": request(b"GET  HTTP/1.1"),
    "a relative target": request(b"GET nothing HTTP/1.1"),
    "an unknown method": request(b"BREW /v1/completions HTTP/1.1"),
    "HTTP/3": request(b"GET / HTTP/3.0"),
    "10 GB": request(POST, JSON, HUGE),
    "10 GB, with 100-continue": request(POST, JSON, HUGE, b"expect: 100-continue"),
    "10 GB for an unknown path": request(b"POST /v1/files HTTP/1.1", JSON, HUGE),
    "a length of 5,000 digits": request(POST, JSON, b"content-length: " + b"9" * 5000),
    "a negative length": request(POST, JSON, b"content-length: -1"),
    "two lengths": request(POST, JSON, b"content-length: 2", b"content-length: 3", content=b"{}"),
    "an unknown coding": request(POST, JSON, b"content-encoding: br", b"content-length: 2", content=b"{}"),
    "four codings": request(
        POST, JSON, b"content-encoding: gzip, gzip, gzip, gzip", b"content-length: 1", content=b"x"
    ),
    "broken gzip": request(POST, JSON, b"content-encoding: gzip", b"content-length: 4", content=b"abcd"),
    "a transfer encoding": request(POST, JSON, b"transfer-encoding: gzip, chunked", content=b"0\r\n\r\n"),
    "a broken chunk": request(POST, JSON, b"transfer-encoding: chunked", content=b"zz\r\n"),
    "200 headers": request(b"GET /v1/models HTTP/1.1", *(b"x-%d: 1" % number for number in range(200))),
    "a long header": request(b"GET /v1/models HTTP/1.1", b"x: " + b"a" * 100_000),
    "a limit of other digits": request(b"GET /v1/files?limit=%C2%B2 HTTP/1.1"),
    "a limit of 5,000 digits": request(b"GET /v1/files?limit=" + b"9" * 5000 + b" HTTP/1.1"),
    "a query that is not UTF-8": request(b"GET /v1/files?after=%ff%fe HTTP/1.1"),
    "a raw byte in a query": request(b"GET /v1/files?after=\xff HTTP/1.1"),
    "a model that is a list": request(POST, JSON, b"content-length: 28", content=b'{"prompt": "a", "model": []}'),
}


def raw_answer(content: bytes) -> tuple[bytes, dict[str, str], Any]:
    head, _, rest = content.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    kept = {name: value for name, value in headers.items() if name not in OF_EACH}
    found = json.loads(rest)
    for name in ("request_id", "trace_id"):
        found["error"].pop(name, None)
    return first.encode(), kept, found


@pytest.mark.parametrize("content", RAW.values(), ids=RAW)
def test_bytes_are_refused_alike(place: Place, both: tuple[httpx.Client, httpx.Client], content: bytes) -> None:
    straight, through = (raw_answer(exchange(place, client, content)) for client in both)
    for _, _, found in (straight, through):
        message = found["error"]["message"]
        message = re.sub(r"at most \d+ bytes", "at most N bytes", message)
        found["error"]["message"] = re.sub(
            r"on this server\. .*", "on this server.", message
        )  # the rest lists its routes
    assert through == straight
    assert b" 4" in straight[0]


def test_slow_body_is_refused_alike(place: Place, both: tuple[httpx.Client, httpx.Client]) -> None:
    slow = request(POST, JSON, b"content-length: 100", content=b"{")
    straight, through = (raw_answer(exchange(place, client, slow)) for client in both)
    assert through == straight
    assert b" 408" in straight[0]
