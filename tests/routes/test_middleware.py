"""Tests the middleware that every request passes: request ids, slashes, errors."""

from urllib.parse import urljoin

import pytest

from oaiserve.routes.exchange import Exchange
from tests.serving import Serve, Served


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/v1/completions"])
def test_every_answer_has_a_request_id_and_a_trace(served: Served, path: str) -> None:
    headers = served.http.get(path).headers
    assert headers["x-request-id"].startswith("req-")
    assert headers["openai-processing-ms"].isdecimal()
    assert len(headers["traceresponse"]) == 55


def test_a_well_formed_id_of_the_client_is_kept(served: Served) -> None:
    assert served.http.get("/health", headers={"x-request-id": "job-7.a_B"}).headers["x-request-id"] == "job-7.a_B"


def test_a_request_id_of_ours_is_also_in_the_id_of_the_answer(served: Served) -> None:
    response = served.complete()
    assert response.headers["x-request-id"].removeprefix("req-") == response.json()["id"].removeprefix("cmpl-")


@pytest.mark.parametrize("prompt", ["Hi", 7])
def test_a_request_whose_record_cannot_be_made_does_not_stay_open(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, prompt: object
) -> None:
    served = serve()
    monkeypatch.setattr(Exchange, "deadline_outcome", lambda exchange, times: 1 // 0)
    # The server closes the connection, which other tests should not share.
    served.client().post("/v1/completions", json={"prompt": prompt})
    served.settle()
    assert not served.open_requests


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models", "/v1///models"])
def test_several_slashes_count_as_one(served: Served, path: str) -> None:
    assert served.http.get(served.url + path).json()["object"] == "list"


@pytest.mark.parametrize(
    "id",
    [
        *(b"", b"a b", b"a" * 129, b"x;y", b"\xe9", b"a\tb", b"x: y", b"\xe2\x80\xae", b"../../etc", b"a,b"),
        b"%0d%0aset-cookie:a=b",
    ],
)
def test_any_other_id_is_replaced_and_carries_nothing_into_headers_and_logs(served: Served, id: bytes) -> None:
    response = served.http.get("/health", headers={"x-request-id": id})
    assert response.headers["x-request-id"].startswith("req-")
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize("traceparent", ["00-" + "1" * 32 + "-" + "1" * 16, "-" * 5000, "é" * 55])
def test_a_malformed_trace_is_replaced(served: Served, traceparent: str) -> None:
    response = served.http.get("/health", headers={"traceparent": traceparent.encode("latin-1")})
    assert response.status_code == 200
    assert not response.headers["traceresponse"].startswith("00-" + "1" * 32)


def test_two_parents_begin_a_new_trace(served: Served) -> None:
    parents = [("traceparent", f"00-{digit * 32}-{digit * 16}-01") for digit in "12"]
    traces = [served.http.get("/health", headers=sent).headers["traceresponse"] for sent in (parents, parents[:1])]
    assert traces[0].split("-")[1] not in ("1" * 32, "2" * 32)
    assert traces[1].split("-")[1] == "1" * 32


@pytest.mark.plugin("pages")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions/"])
def test_an_answer_links_to_the_page_of_its_request(served: Served, path: str) -> None:
    for body, status in ({"prompt": "Hi"}, 200), ({"prompt": 7}, 400):
        answer = served.http.post(served.url + path, json=body, headers={"x-request-id": "job-7"})
        assert answer.status_code == status
        link = answer.links["describedby"]["url"]
        assert urljoin(f"http://host/llm{path}", link) == "http://host/llm/requests/job-7"
    assert "link" not in served.http.get("/v1/models").headers  # it has no account


def test_an_answer_of_a_server_without_the_page_has_no_link(serve: Serve) -> None:
    assert "link" not in serve(host="0.0.0.0").complete().headers


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", {"GET", "HEAD", "POST"}),
        ("PATCH", "/v1/conversations/conv_1", {"DELETE", "GET", "HEAD", "POST"}),
        ("GET", "/v1/completions", {"POST"}),
    ],
)
def test_other_method_is_refused_with_all_that_the_path_takes(
    served: Served, method: str, path: str, allowed: set[str]
) -> None:
    response = served.http.request(method, path)
    assert response.status_code == 405
    assert {*response.headers["allow"].split(", ")} == allowed
    message = response.json()["error"]["message"]
    assert message == f"{method} is not allowed on {path}, which takes {' and '.join(sorted(allowed - {'HEAD'}))}."
