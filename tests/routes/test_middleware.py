"""Tests the middleware that every request passes: request ids, slashes, API keys, CORS."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.routes.conftest import Serve, Served

OPERATORS = ("/health", "/ready", "/version", "/metrics")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/v1/completions"])
def test_every_answer_has_a_request_id_and_a_trace(served: Served, path: str) -> None:
    headers = served.http.get(path).headers
    assert headers["x-request-id"].startswith("req-")
    assert headers["openai-processing-ms"].isdecimal()
    assert len(headers["traceresponse"]) == 55


def test_a_well_formed_id_of_the_client_is_kept(served: Served) -> None:
    assert served.http.get("/health", headers={"x-request-id": "job-7.a_B"}).headers["x-request-id"] == "job-7.a_B"


@pytest.mark.parametrize("insane", ["", "a b", "a" * 129, "x;y", "é".encode("latin-1")])
def test_any_other_id_is_replaced(served: Served, insane: str | bytes) -> None:
    assert served.http.get("/health", headers={"x-request-id": insane}).headers["x-request-id"].startswith("req-")


def test_a_request_id_of_ours_is_also_in_the_id_of_the_answer(served: Served) -> None:
    response = served.complete()
    assert response.headers["x-request-id"].removeprefix("req-") == response.json()["id"].removeprefix("cmpl-")


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models", "/v1///models"])
def test_several_slashes_count_as_one(served: Served, path: str) -> None:
    assert served.http.get(served.url + path).json()["object"] == "list"


def test_a_server_without_keys_accepts_any_key(served: Served) -> None:
    assert served.http.get("/v1/models", headers=bearer("any")).status_code == 200


def test_each_of_several_keys_is_accepted(serve: Serve) -> None:
    served = serve(api_key=("one", "two"))
    for key in ("one", "two"):
        assert served.http.get("/v1/models", headers=bearer(key)).status_code == 200
    assert served.http.get("/v1/models", headers={"authorization": "bearer  two"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("on"),
        bearer("onee"),
        {"authorization": "Bearer"},
        {"authorization": "one"},
        {"authorization": "Basic one"},
    ],
)
def test_anything_else_is_unauthorized(serve: Serve, headers: dict[str, str]) -> None:
    served = serve(api_key=("one",))
    for path in ("/v1/models", "//v1//models", "/tokenize", "/v1/completions", "/nothing"):
        response = served.http.get(served.url + path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_key_that_is_not_utf_8_is_unauthorized(serve: Serve) -> None:
    served = serve(api_key=("one",))
    response = served.http.get("/v1/models", headers={"authorization": b"Bearer \xff\xfe"})
    assert response.status_code == 401


def test_the_operators_routes_are_open(serve: Serve) -> None:
    served = serve(api_key=("one",))
    assert [served.http.get(path).status_code for path in OPERATORS] == [200] * 4


def test_guard_all_requires_a_key_on_the_operators_routes(serve: Serve) -> None:
    served = serve(api_key=("one",), guard_all=True)
    assert [served.http.get(path).status_code for path in OPERATORS] == [401] * 4
    assert served.http.get("/health", headers=bearer("one")).status_code == 200


def test_the_sdk_raises_its_authentication_error(serve: Serve) -> None:
    served = serve(api_key=("one",))
    with served.sdk() as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def preflight(client: httpx.Client, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return client.options("/v1/chat/completions", headers=headers)


def test_a_web_page_of_an_allowed_origin_may_ask_and_read_errors(serve: Serve) -> None:
    served = serve(api_key=("one",), cors_origin=("https://app.example.com",))
    assert preflight(served.http, "https://app.example.com").status_code == 200
    refused = served.http.get("/v1/models", headers={"origin": "https://app.example.com"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example.com"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_other_origins_are_refused(serve: Serve) -> None:
    served = serve(cors_origin=("https://app.example.com",))
    assert preflight(served.http, "https://evil.example.com").status_code == 400


def test_without_origins_options_is_not_allowed(served: Served) -> None:
    assert preflight(served.http, "https://app.example.com").status_code == 405
