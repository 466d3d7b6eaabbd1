"""A replica that answers what is no HTTP, or has no end: its client gets a 502, and nobody else notices."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from oaiserve.config import RouteOptions
from oaiserve.scale.gateway import gateway, upstream
from oaiserve.scale.gateway.app import create_gateway
from oaiserve.scale.gateway.upstream import Address
from tests.engine.doubles import TIMEOUT_SECONDS
from tests.routes.conftest import RunningServer
from tests.scale.gateway.doubles import OPTIONS, QUICK
from tests.waiting import wait_until

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: one\n\n"


class RawReplica:
    """Answers each request with `answer`, byte for byte, except those for its reports."""

    def __init__(self) -> None:
        self.answer = GOOD
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
                status = b"404" if head.startswith(b"GET /debug/report") else b"200"
                own = b"HTTP/1.1 %b OK\r\ncontent-length: 0\r\n\r\n" % status
                sock.sendall(own if is_report else self.answer)

    def close(self) -> None:
        self._listening.close()


@contextmanager
def gateway_before(replica: RawReplica) -> Iterator[httpx.Client]:
    async def resolve(url: str) -> list[Address]:
        return [replica.address]

    made = create_gateway(RouteOptions(replica=("http://raw",)), resolve, QUICK)
    with (
        RunningServer(made.app, OPTIONS, on_drain=made.gateway.drain) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS) as http,
    ):
        wait_until(lambda: made.gateway.is_ready)
        yield http


@pytest.fixture(scope="module")
def raw() -> Iterator[tuple[RawReplica, httpx.Client]]:
    replica = RawReplica()
    with gateway_before(replica) as http:
        yield replica, http
    replica.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 999 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"SMTP 220 hello\r\n",
        b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * upstream.MOST_HEAD_BYTES * 2,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * upstream.MOST_HEAD_BYTES,
        b"HTTP/1.1 100 Continue\r\n\r\n" * upstream.MOST_HEAD_BYTES,
    ],
    ids=["status", "protocol", "no HTTP", "long header", "headers", "interim answers"],
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
    monkeypatch.setattr(gateway, "MOST_EVENT_BYTES", 100_000)
    replica.answer = STREAM + b"data: " + b"a" * 300_000
    lines = http.post("/v1/completions", json={"prompt": "Hello", "stream": True}).text.splitlines()
    assert (lines[0], lines[-2]) == ("data: one", "data: [DONE]")
    assert json.loads(lines[2].removeprefix("data: "))["error"]["code"] == "service_unavailable"
