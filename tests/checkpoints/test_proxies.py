"""Advice for an address that cannot be reached names the proxy that is set, and says whether it answers."""

import socket

import pytest

from oaiserve.checkpoints.proxies import advice_on_proxy, proxy_for

HUB = "https://hub.test"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_without_a_proxy_one_may_be_missing() -> None:
    assert advice_on_proxy(HUB) == "Behind a proxy, set HTTPS_PROXY"


def test_proxy_that_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("HTTPS_PROXY", address)
        assert advice_on_proxy(HUB) == f"Requests to it go through {address}, the proxy that HTTPS_PROXY names"


@pytest.mark.parametrize(
    ("variables", "variable", "shown"),
    [
        ({"HTTPS_PROXY": "http://name:secret@proxy.test:3128"}, "HTTPS_PROXY", "http://proxy.test:3128"),
        ({"https_proxy": "proxy.test", "HTTPS_PROXY": "http://other.test"}, "https_proxy", "http://proxy.test:80"),
        ({"ALL_PROXY": "socks5://[::1]"}, "ALL_PROXY", "socks5://[::1]:1080"),
        ({"HTTPS_PROXY": "http://proxy.test:no"}, "HTTPS_PROXY", "its value"),
    ],
)
def test_proxy_is_found_as_clients_find_it_and_its_password_is_not_shown(
    variables: dict[str, str], variable: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    proxy = proxy_for(HUB)
    assert proxy is not None
    assert (proxy.variable, proxy.shown) == (variable, shown)


@pytest.mark.parametrize("variables", [{"HTTP_PROXY": "http://proxy.test"}, {"NO_PROXY": "hub.test"}])
def test_proxies_for_other_addresses_are_ignored(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.test") if "NO_PROXY" in variables else None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(HUB) is None
