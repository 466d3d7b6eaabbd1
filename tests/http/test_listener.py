"""Tests that connections with TLS are bounded from their first moment on, before there is a handshake."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.commands.listening import listen
from oaiserve.config import Config, ServerOptions
from oaiserve.http.connections import Refusal
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tests.serving import RunningServer, running_server
from tests.waiting import wait_until

pytestmark = pytest.mark.openssl


@pytest.fixture
def server(certificates: dict[str, Path]) -> Iterator[tuple[tuple[str, int], RunningServer]]:
    tls = {"tls_certificate": certificates["sound"], "tls_key": certificates["sound"]}
    limits = {"max_connections": 2, "max_connections_per_address": 0, "header_timeout_seconds": 1}
    options = ServerOptions(**tls, **limits)
    with running_server(create_app(Config("demo", options), FakeEngine(), FakeTelemetry()), options) as (url, running):
        address = urlsplit(url)
        yield (str(address.hostname), int(address.port or 0)), running


def ask(address: tuple[str, int]) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(address) as sock, context.wrap_socket(sock) as tls:
        tls.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return tls.recv(12)


def test_a_handshake_that_does_not_come_counts_and_ends(server: tuple[tuple[str, int], RunningServer]) -> None:
    address, running = server
    with (
        socket.create_connection(address) as first,
        socket.create_connection(address) as second,
    ):
        wait_until(lambda: running.connections.num_open == 2)
        with socket.create_connection(address) as refused:
            assert refused.recv(1) == b""  # without a handshake it could not read an answer
        assert first.recv(1) == second.recv(1) == b""
    wait_until(lambda: running.connections.num_open == 0)
    assert (running.connections.refused[Refusal.ALL], running.connections.refused[Refusal.HANDSHAKE]) == (1, 2)
    assert ask(address) == b"HTTP/1.1 200"


def test_http_without_tls_is_told_to_use_https_and_logged_once(
    server: tuple[tuple[str, int], RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    (host, port), running = server
    for _ in range(2):
        answer = httpx.post(f"http://{host}:{port}/v1/completions", json={"prompt": "Hello"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "This port speaks HTTPS. Begin the URL with https://."
    wait_until(lambda: running.connections.num_open == 0)
    assert running.connections.refused[Refusal.HANDSHAKE] == 2
    assert [line for line in caplog.messages if "https://" in line] == [
        "127.0.0.1 sent HTTP to this port, which speaks HTTPS: its URL must begin with https://"
    ]


def test_a_broken_handshake_leaves_nothing_open(server: tuple[tuple[str, int], RunningServer]) -> None:
    address, running = server
    for _ in range(5):
        with socket.create_connection(address) as client:
            client.sendall(b"\x16\x03\x01\x00\x05hello")
            while client.recv(1024):
                pass
    assert ask(address) == b"HTTP/1.1 200"
    wait_until(lambda: running.connections.num_open == 0)
    assert running.connections.refused[Refusal.HANDSHAKE] == 5


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("sound", ""),
        ("of another", ""),
        ("expired", "certificate has expired"),
        ("not yet valid", "certificate is not yet valid"),
    ],
)
def test_a_certificate_outside_of_its_dates_is_a_warning_at_the_start(
    certificates: dict[str, Path], kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServerOptions(tls_certificate=certificates[kind], tls_key=certificates[kind])
    with socket.create_server(("127.0.0.1", 0)) as sock:
        listen(Config("demo", options), sock, lambda: None)
    expected = f"Clients will refuse --tls-certificate '{certificates[kind]}': {reason}."
    assert caplog.messages == ([expected] if reason else [])
