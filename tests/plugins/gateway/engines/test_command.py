"""The flags of `oaiserve route` for other engines: what is refused, and what is passed on."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from oaiserve.commands.banner import Banner
from oaiserve.config import OptionError
from oaiserve.plugins.gateway.command import command
from oaiserve.plugins.gateway.engines import serve
from oaiserve.plugins.gateway.options import EnginesOptions, RouteOptions
from oaiserve.plugins.gateway.serve import serve_gateway
from oaiserve.routes.pages import Pages

URL = "http://127.0.0.1:8080"


def test_replicas_and_engines_do_not_go_together() -> None:
    with pytest.raises(OptionError, match="--replica and --engine do not go together"):
        command(options=RouteOptions(replica=(URL,)), engines=EnginesOptions(engine=(URL,)))


def test_without_either_both_are_named() -> None:
    with pytest.raises(OptionError, match="--replica is missing.* or --engine for each"):
        command()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"engine": ("localhost:8080",)}, "--engine is 'localhost:8080', but must be a URL"),
        ({"engine": (URL,), "engine_key": "two words"}, "--engine-key is not usable"),
        ({"engine_key": "secret"}, "--engine-key is for the servers of --engine"),
    ],
)
def test_wrong_flags_are_refused_without_their_keys(options: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says) as refused:
        EnginesOptions(**options)  # type: ignore[arg-type]
    assert "secret" not in str(refused.value)
    assert "two words" not in str(refused.value)


def test_keys_are_not_in_the_text_of_the_options() -> None:
    assert "secret" not in repr(EnginesOptions(engine=(URL,), engine_key="secret", api_key=("secret-2",)))


def test_the_gateway_has_the_listener_and_the_keys_of_the_flags(tmp_path: Path) -> None:
    engines = EnginesOptions(engine=(URL,), api_key=("a",), api_key_file=(tmp_path,))
    config = engines.config_of(RouteOptions(port=9000, open_dashboard=True), "m")
    assert (config.server.port, config.server.open_dashboard, config.needs_key) == (9000, True, True)
    assert (config.server.api_key, config.server.api_key_file) == (("a",), (tmp_path,))


def test_the_banner_names_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def run(app: object, config: object, sock: object, connections: object, banner: Banner, **_: object) -> None:
        shown.append(banner.facts["Engines"])

    app = SimpleNamespace(state=SimpleNamespace(pages=Pages()))
    made = app, SimpleNamespace(drain=lambda: None)
    monkeypatch.setattr(serve, "create_engine_gateway", lambda *_, **__: made)
    monkeypatch.setattr(serve, "run_until_signal", run)
    monkeypatch.setattr(serve.logs, "configure", lambda *_, **__: None)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert serve.serve_engines(RouteOptions(), EnginesOptions(engine=(URL, f"{URL}/v1")), sock) == 0
    assert shown == [f"{URL}, {URL}/v1"]


def test_keys_for_clients_of_replicas_are_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = "oaiserve.plugins.gateway.serve"
    monkeypatch.setattr(f"{module}.run_until_signal", lambda *_, **__: None)
    monkeypatch.setattr(f"{module}.logs.configure", lambda *_, **__: None)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        serve_gateway(RouteOptions(replica=(URL,)), sock, ignores_keys=True)
    assert "--api-key and --api-key-file count only with --engine" in caplog.text
