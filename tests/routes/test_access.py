"""Tests who may ask: by which names of the server, from which web pages, and with which keys."""

import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from oaiserve.app import routes
from oaiserve.config import Config
from oaiserve.errors import OLLAMA_PATHS
from oaiserve.wire.report import ROUTER_HEADER
from tests.routes.asking import bearer
from tests.serving import Serve, Served

OPERATORS = ("/health", "/ready", "/version", "/metrics", "/openapi.json")
ALL_ROUTES = [
    (method, re.sub(r"\{\w+(:path)?\}", "x", route.path.replace("{name}", "base.css")))
    for route in routes(Config("demo"))
    for method in sorted(route.methods or ())
]
EVIL = "http://evil.example:8000"


def check_refused(response: httpx.Response, status: int, code: str | None, *words: str) -> None:
    """Check status, code, and that the answer is OpenAI's error object and its message has the words. The errors of
    Ollama's API are only a message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    if response.request.method != "HEAD":
        error = response.json()["error"]
        if response.url.path in OLLAMA_PATHS:
            message = error
        else:
            assert error["code"] == code
            message = error["message"]
        assert [word for word in words if word not in message] == []


def raw(served: Served, request: bytes) -> bytes:
    """Send bytes and return the answer, which ends with the connection."""
    with served.connect() as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(65536), b""))


# -- names of the server ----------------------------------------------------------------------------------------------


def named(served: Served, host: str) -> httpx.Response:
    return served.http.get("/v1/models", headers={"host": host})


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:1", "localhost.", "a.b.localhost:8000"),
        *("127.0.0.1", "127.9.9.9:80", "[::1]:8000", "[::1]", "[::ffff:127.0.0.1]"),
    ],
)
def test_a_local_server_answers_to_every_loopback_name(served: Served, host: str) -> None:
    assert named(served, host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost"),
        *("0.0.0.0:8000", "192.168.0.7", "128.0.0.1", "local", "[2001:db8::1]:8000", "2130706433", "0x7f.1"),
    ],
)
def test_a_local_server_refuses_any_other_name_and_says_what_allows_it(served: Served, host: str) -> None:
    name = host.removesuffix(":8000").strip("[]")
    check_refused(named(served, host), 403, "host_not_allowed", f"'{name}'", f"--allowed-host {name}")


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
def test_every_route_refuses_a_foreign_name(served: Served, method: str, path: str) -> None:
    response = served.http.request(method, path, headers={"host": "evil.example"})
    check_refused(response, 403, "host_not_allowed")


SOME_NAMES = ("LLM.example.com", "10.0.0.7", "2001:db8:0::1")


@pytest.mark.parametrize(
    ("options", "accepted", "refused"),
    [
        (
            {"allowed_host": SOME_NAMES},
            ("llm.example.com:8000", "LLM.EXAMPLE.com.", "10.0.0.7", "[2001:DB8::1]:80", "localhost"),
            ("other.example.com", "10.0.0.8"),
        ),
        ({"host": "0.0.0.0"}, ("llm.example.com", "10.0.0.7:8000", "localhost"), ()),
        (
            {"host": "0.0.0.0", "allowed_host": ("llm.example.com",)},
            ("llm.example.com", "10.0.0.7:8000", "[fe80::1]", "localhost"),
            ("evil.example",),
        ),
    ],
    ids=["local", "for-all", "for-all-with-names"],
)
def test_a_server_answers_to_its_allowed_names_in_any_spelling_and_one_for_all_to_addresses(
    serve: Serve, options: dict[str, Any], accepted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    served = serve(**options)
    assert {host: named(served, host).status_code for host in accepted} == dict.fromkeys(accepted, 200)
    for host in refused:
        check_refused(named(served, host), 403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    [
        *("", "a b", "a:b", "a:99999", "[::1", "::1", "[]", "user@localhost", "localhost/x", "a" * 300, "é"),
        "[fe80::1%25eth0]",
    ],
)
def test_a_malformed_name_is_a_bad_request(served: Served, host: str) -> None:
    response = served.http.get("/v1/models", headers={"host": host.encode("latin-1")})
    check_refused(response, 400, None, "Host")


def test_only_one_name_is_accepted(served: Served) -> None:
    answer = raw(served, b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n")
    assert b" 400 " in answer.splitlines()[0]
    assert b"localhost, evil.example" in answer


def test_a_name_may_be_missing_in_the_oldest_version_only(served: Served) -> None:
    assert b" 200 " in raw(served, b"GET /health HTTP/1.0\r\n\r\n").splitlines()[0]
    assert b" 400 " in raw(served, b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n").splitlines()[0]


# -- web pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
@pytest.mark.parametrize("origin", [EVIL, "null"])
def test_every_route_refuses_the_pages_of_others(served: Served, method: str, path: str, origin: str) -> None:
    response = served.http.request(method, path, headers={"origin": origin})
    check_refused(response, 403, "origin_not_allowed", origin, f"--cors-origin {origin}")
    assert served.engine.submitted.empty()


@pytest.mark.parametrize(
    ("keys", "shares", "num_salts"), [(("a", "b"), False, 2), (("a", "b"), True, 1), ((), False, 1)]
)
def test_keys_share_prompts_in_the_prefix_cache_only_if_asked_to(
    serve: Serve, keys: tuple[str, ...], shares: bool, num_salts: int
) -> None:
    """So it is with each salt of their own, and a key cannot take the salt of another."""
    served = serve(api_key=keys, share_prefix_cache=shares)
    salts: dict[str | None, list[str]] = {}
    for key in ("a", "b", "a"):
        for own in (None, "mine"):
            body = {"prompt": "Hello", "max_tokens": 2} | ({} if own is None else {"cache_salt": own})
            assert served.http.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
            salts.setdefault(own, []).append(served.engine.submitted.get_nowait().cache_salt)
    for first, second, again in salts.values():
        assert (first == again, len({first, second})) == (True, num_salts)
    assert len({salt for of_own in salts.values() for salt in of_own}) == 2 * num_salts
    assert not any(key == salt.split(" ")[0] for key in keys for of_own in salts.values() for salt in of_own)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost:8000", "https://localhost:8000"),  # a proxy in front speaks HTTPS
        ("localhost", "https://localhost"),
        ("localhost:443", "https://localhost"),
        ("localhost", "http://localhost:80"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_servers_own_pages_may_ask(served: Served, host: str, origin: str) -> None:
    response = served.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"host": host, "origin": origin})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:8001", "http://127.0.0.1:8000", "http://localhost", "http://localhost:8000.evil.example"),
        *("http://localhost:8000@evil.example", "file://localhost:8000", "", "localhost:8000"),
    ],
)
def test_a_page_from_another_port_or_name_is_another_page(served: Served, origin: str) -> None:
    headers = {"host": "localhost:8000", "origin": origin}
    check_refused(served.http.get("/v1/models", headers=headers), 403, "origin_not_allowed")


def test_one_foreign_origin_of_several_is_enough(served: Served) -> None:
    headers = [("host", "localhost:1"), ("origin", "http://localhost:1"), ("origin", EVIL)]
    check_refused(served.http.get("/v1/models", headers=headers), 403, "origin_not_allowed")


def test_a_body_without_a_type_is_json_unless_a_page_sends_it(served: Served) -> None:
    def ask(**headers: str) -> httpx.Response:
        return served.http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=headers)

    assert ask().status_code == ask(origin=served.url, **{"content-type": "application/json"}).status_code == 200
    check_refused(ask(origin=served.url), 400, None, "application/json")


def preflight(client: httpx.Client, origin: str, method: str = "POST") -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type",
    }
    return client.options("/v1/chat/completions", headers=headers)


def test_a_web_page_of_an_allowed_origin_may_ask_and_read_errors(serve: Serve) -> None:
    served = serve(api_key=("one",), cors_origin=("https://app.example.com", "app://obsidian.md"))
    assert preflight(served.http, "app://obsidian.md").status_code == 200
    allowed = preflight(served.http, "https://app.example.com")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example.com"
    assert allowed.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = served.http.get("/v1/models", headers={"origin": "https://app.example.com"})
    check_refused(refused, 401, "invalid_api_key")
    assert refused.headers["access-control-allow-origin"] == "https://app.example.com"
    assert refused.headers["vary"] == "Origin"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_other_origins_are_refused_in_preflights_too(serve: Serve) -> None:
    served = serve(cors_origin=("https://app.example.com",))
    refused = preflight(served.http, "https://evil.example.com")
    check_refused(refused, 403, "origin_not_allowed", "https://evil.example.com")
    assert "access-control-allow-origin" not in refused.headers
    check_refused(preflight(serve().http, "https://app.example.com"), 403, "origin_not_allowed")


def test_a_preflight_for_another_method_is_told_the_methods(serve: Serve) -> None:
    served = serve(cors_origin=("*",))
    assert preflight(served.http, "null", "PUT").headers["access-control-allow-methods"] == "GET, POST, DELETE"


# -- keys -------------------------------------------------------------------------------------------------------------


def test_each_of_several_keys_is_accepted(serve: Serve) -> None:
    served = serve(api_key=("one", "two"))
    for key in ("one", "two"):
        assert served.http.get("/v1/models", headers=bearer(key)).status_code == 200
    assert served.http.get("/v1/models", headers={"authorization": "bearer  two"}).status_code == 200
    for headers in ({"x-api-key": "two"}, {"x-api-key": "two", "authorization": "Bearer"}):  # as Anthropic's clients do
        assert served.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("on"),
        bearer("onee"),
        {"authorization": "Bearer"},
        {"authorization": "one"},
        {"authorization": "Basic one"},
        {"x-api-key": "on"},
        {"authorization": b"Bearer \xff\xfe"},  # not UTF-8
    ],
)
def test_anything_else_is_unauthorized(serve: Serve, headers: dict[str, Any]) -> None:
    served = serve(api_key=("one",))
    for path in ("/v1/models", "//v1//models", "/tokenize", "/v1/completions", "/nothing"):
        response = served.http.get(served.url + path, headers=headers)
        check_refused(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("keys", "trusted", "is_shown"), [("ab", (), 0), ("ab", ("127.0.0.1",), 1), ("a", (), 1)])
def test_keys_of_prompts_are_told_to_a_trusted_gateway_alone_where_keys_are_kept_apart(
    serve: Serve, keys: str, trusted: tuple[str, ...], is_shown: bool
) -> None:
    served = serve(api_key=(*keys,), trusted_proxy=trusted)
    for headers, is_shown_then in ((bearer("a") | {ROUTER_HEADER: "1"}, is_shown), (bearer("a"), len(keys) == 1)):
        report = served.http.get("/debug/report", headers=headers).json()
        assert (bool(report["keys"]), report["num_running"]) == (is_shown_then, 2)


SPELLINGS = (
    *("{}", "{}/", "/{}", "{}//", "//{}//", "{}?a=b", "{}%2F", "/%2F{}", "{}/.", "/.{}", "{}/../x", "{}%00", "{};a"),
)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("guard_all", [False, True])
def test_no_spelling_of_a_route_is_open(serve: Serve, spelling: str, guard_all: bool) -> None:
    """Every answer without a key is a 401, or it is one that anybody may have: a probe, or a file of the page."""
    served = serve(api_key=("one",), guard_all=guard_all)
    is_open = {
        "/",
        "/dashboard",
        "/requests",
        "/clients",
        "/runs",
        "/docs",
        "/favicon.ico",
        *(() if guard_all else OPERATORS),
    }
    is_open |= {"/dashboard/static/base.css", "/requests/x", "/runs/x"}
    # To guard all changes the answers of the operators' routes alone.
    asked = [(method, path) for method, path in ALL_ROUTES if path in OPERATORS] if guard_all else ALL_ROUTES
    for method, path in asked:
        for encoded in (path, "".join(f"%{ord(c):02x}" if c.isalpha() else c for c in path)):
            response = served.http.request(method, served.url + spelling.format(encoded))
            if response.status_code != 401:
                assert path in is_open or response.status_code == 404, (method, encoded, response.status_code)
                assert "Hello" not in response.text
    assert served.engine.submitted.empty()


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "TRACE", "PUT", "PROPFIND"])
def test_no_method_passes_without_a_key(serve: Serve, method: str) -> None:
    served = serve(api_key=("one",))
    for path in ("/v1/models", "/v1/completions", "/debug/requests", "/dashboard/feed", "/nothing"):
        check_refused(served.http.request(method, path), 401, "invalid_api_key")


@pytest.mark.parametrize("guard_all", [False, True])
def test_the_operators_routes_are_open_unless_all_are_guarded(serve: Serve, guard_all: bool) -> None:
    served = serve(api_key=("one",), guard_all=guard_all)
    assert [served.http.get(path).status_code for path in OPERATORS] == [401 if guard_all else 200] * 5
    assert served.http.get("/health", headers=bearer("one")).status_code == 200


def test_the_name_of_the_key_is_whose_the_request_is(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice s3cret-a\ns3cret-b\n")
    served = serve(api_key=("zero", "s3cret-z"), api_key_file=(keys,))
    for key, name in (("s3cret-z", "key-2"), ("s3cret-a", "alice"), ("s3cret-b", "keys:2")):
        served.http.post("/v1/completions", json={"prompt": "Hi"}, headers=bearer(key))
        assert served.engine.submitted.get().client == name
        assert served.telemetry.next_record().client == name
    listed = served.http.get("/debug/requests", headers=bearer("zero"))
    assert [entry["client"] for entry in listed.json()["requests"]][:3] == ["keys:2", "alice", "key-2"]
    assert "s3cret" not in listed.text


def test_without_keys_the_address_stays_out_of_the_record(served: Served) -> None:
    served.complete()
    assert served.engine.submitted.get().client == "127.0.0.1"
    assert served.telemetry.next_record().client is None


def test_a_file_of_keys_opens_the_page_on_any_address(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice s3cret\n")
    served = serve(host="0.0.0.0", api_key_file=(tmp_path / "keys",))
    assert served.http.get("/debug/requests", headers=bearer("s3cret")).status_code == 200
    assert served.http.get("/debug/requests").status_code == 401


def test_refusals_are_counted_and_logged_without_the_key(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(api_key=("one", "s3cret"))
    served.telemetry.refused_access.clear()
    with caplog.at_level(logging.WARNING, "oaiserve.routes.door.access"):
        served.http.get("/v1/models")
        served.http.get("/v1/models", headers=bearer("s3cre"))
        served.http.get("/v1/models", headers={"host": "evil.example"})
        served.http.get("/v1/models", headers={"origin": EVIL})
    assert served.telemetry.refused_access == ["missing_key", "unknown_key", "host", "origin"]
    assert len({record.msg for record in caplog.records}) == 4, "messages of different kinds are limited one by one"
    assert "'evil.example', GET" in caplog.text
    assert repr(EVIL) in caplog.text
    assert all("GET '/v1/models' from 127.0.0.1" in record.getMessage() for record in caplog.records)
    assert "s3cre" not in caplog.text
