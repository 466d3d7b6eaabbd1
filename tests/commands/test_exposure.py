"""A server that needs no key says at its start who can use it, unless only this machine can."""

import logging
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from oaiserve.commands import listening
from oaiserve.commands.exposure import A_KEY_CLOSES, address_in_network, warn_if_open
from oaiserve.commands.listening import run_until_signal
from oaiserve.config import Config, ServerOptions
from oaiserve.hosts import is_address, is_loopback
from oaiserve.http.connections import Connections
from oaiserve.plugins.gateway import serve
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.screen import Screen
from oaiserve.telemetry.log_lines import ShortFormatter

ADDRESSES: dict[int, str | None] = {socket.AF_INET: "192.168.1.5", socket.AF_INET6: "2001:db8::5"}


class Bound:
    """A socket that is bound to an address."""

    family = socket.AF_INET

    def __init__(self, host: str) -> None:
        self._host = host

    def getsockname(self) -> tuple[str, int]:
        return self._host, 8000


def warnings(
    options: ServerOptions, bound: str, caplog: pytest.LogCaptureFixture, addresses: dict[int, str | None] = ADDRESSES
) -> list[str]:
    caplog.clear()
    warn_if_open(Config("demo", options), cast("socket.socket", Bound(bound)), A_KEY_CLOSES, addresses.get)
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}
    return caplog.messages


@pytest.mark.parametrize(
    ("host", "bound", "addresses", "url"),
    [
        ("0.0.0.0", "0.0.0.0", ADDRESSES, "http://192.168.1.5:8000"),
        ("::", "::", ADDRESSES, "http://192.168.1.5:8000"),
        ("::", "::", ADDRESSES | {socket.AF_INET: None}, "http://[2001:db8::5]:8000"),
        ("0.0.0.0", "0.0.0.0", {}, "http://0.0.0.0:8000"),
        ("192.168.1.7", "192.168.1.7", ADDRESSES, "http://192.168.1.7:8000"),
        ("tower.lan", "10.1.2.3", ADDRESSES, "http://10.1.2.3:8000"),
    ],
)
def test_an_open_server_names_the_address_that_others_reach_and_what_closes_it(
    host: str, bound: str, addresses: dict[int, str | None], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = warnings(ServerOptions(host=host), bound, caplog, addresses)
    assert line == (
        f"Open: everyone who can reach {url} can use this server without a key. Set OAISERVE_API_KEY (--api-key) to "
        "require a key, or --host 127.0.0.1 to answer this machine only."
    )


def test_tls_does_not_close_a_server(caplog: pytest.LogCaptureFixture) -> None:
    options = ServerOptions(host="0.0.0.0", tls_certificate=Path("c.pem"), tls_key=Path("k.pem"))
    assert "https://192.168.1.5:8000" in warnings(options, "0.0.0.0", caplog)[0]


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (ServerOptions(), "127.0.0.1"),
        (ServerOptions(host="localhost"), "127.0.0.1"),
        (ServerOptions(host="::1"), "::1"),
        (ServerOptions(host="my-laptop"), "127.0.1.1"),
        (ServerOptions(host="0.0.0.0", api_key=("k",)), "0.0.0.0"),
        (ServerOptions(host="0.0.0.0", api_key_file=(Path("keys"),)), "0.0.0.0"),
    ],
)
def test_a_server_with_a_key_or_on_loopback_says_nothing(
    options: ServerOptions, bound: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings(options, bound, caplog) == []


def test_the_line_is_yellow_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(ServerOptions(host="0.0.0.0"), "0.0.0.0", caplog)
    line = ShortFormatter(Screen(has_colours=True)).format(caplog.records[0])
    assert "\x1b[33mwarning: Open: everyone" in line


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let servers end as soon as they have started, and return what happened in order."""
    happened: list[str] = []

    class Ended:
        def __init__(self, *_: object, **__: object) -> None:
            self.handle_exit = None

        def run(self, sockets: list[socket.socket]) -> None:
            happened.append("served")

    monkeypatch.setattr("oaiserve.http.server.Server", Ended)
    monkeypatch.setattr(listening.signal, "signal", lambda *_: None)
    return happened


@pytest.mark.parametrize("closed_by", [A_KEY_CLOSES, None])
def test_the_warning_comes_after_the_banner_unless_others_require_keys(
    closed_by: str | None, serving: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Logged(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            serving.append(record.getMessage()[:5])

    handler = Logged()
    logging.getLogger("oaiserve.commands").addHandler(handler)
    try:
        with socket.create_server(("0.0.0.0", 0)) as sock:
            config = Config("demo", ServerOptions(host="0.0.0.0"))
            banner = partial(serving.append, "banner")
            connections = cast("Connections", None)
            run_until_signal(_no_app, config, sock, connections, banner, closed_by=closed_by)
    finally:
        logging.getLogger("oaiserve.commands").removeHandler(handler)
    assert serving == ["banner", *(["Open:"] if closed_by else []), "served"]


async def _no_app(*_: object) -> None:
    raise AssertionError("No request was sent.")


def test_a_gateway_warns_unless_it_has_a_key_of_its_servers(
    serving: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve.logs, "configure", lambda *_: None)
    options = RouteOptions(host="0.0.0.0", port=0, replica=("http://10.0.0.5:8000",))
    for each, warns in ((options, True), (replace(options, replica_key="k"), False)):
        caplog.clear()
        with socket.create_server(("0.0.0.0", 0)) as sock:
            assert serve.serve_gateway(each, sock) == 0
        lines = [line for line in caplog.messages if line.startswith("Open: everyone who can reach http://")]
        assert len(lines) == warns
        assert all("set OAISERVE_REPLICA_KEY (--replica-key)" in line for line in lines)
    assert serving == ["served", "served"]


def test_the_own_address_is_one_that_others_can_reach_or_none() -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        address = address_in_network(family)
        assert address is None or (is_address(address) and not is_loopback(address))
