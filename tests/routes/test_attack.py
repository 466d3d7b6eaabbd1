"""Attacks every route with generated requests: the server never fails, and each refusal is an error object."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from oaiserve.app import routes
from oaiserve.config import Config
from oaiserve.routes.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from oaiserve.routes.objects import AssistantMessage
from oaiserve.routes.protocol import UNSUPPORTED
from tests.routes.conftest import Served

PATHS = sorted({route.path.replace("{model_id:path}", "org/demo") for route in routes(Config("demo"))})
TO_POST = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
FIELDS = sorted(
    {name for body in BODIES for name in body.__struct_fields__} | UNSUPPORTED.keys() | {"", "x\u0000", "é"}
)
GOOD = {"prompt": '"Hi"', "messages": '[{"role": "user", "content": "Hi"}]', "tokens": "[72]"}


def nested(depth: int, opening: str = "[", closing: str = "]", end: str = "") -> str:
    return opening * depth + end + closing * depth


DEPTHS = st.sampled_from([2, 60, 300, 800, 900, 950, 980, 990, 995, 1000, 1100, 50_000])
RAW_VALUES = st.one_of(
    st.sampled_from(
        ["null", "true", "0", "-1", "1.0", "1e999", "-0.0", "9" * 400, "9" * 5000, "1e308", "NaN", "Infinity"]
    ),
    st.sampled_from(
        ["{}", "[]", '""', '"\\ud800"', '"\\u0000"', '"\\u202e"', "[[]]", "[null]", '{"a": 1}', '{"": ""}', "["]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ).map(json.dumps),
    st.integers(1, 100_000).map(lambda number: json.dumps("x" * number)),
    DEPTHS.map(nested),
    DEPTHS.map(lambda depth: nested(depth, '{"a":', "}", "1")),
    DEPTHS.map(lambda depth: '[{"type": ' + nested(depth) + "}]"),
)


@st.composite
def messages(draw: st.DrawFn) -> str:
    fields = {"role": '"user"', "content": '"Hi"'}
    fields |= draw(st.dictionaries(st.sampled_from(AssistantMessage.__struct_fields__), RAW_VALUES, max_size=2))
    return f"[{_object(fields)}]"


def _object(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items()) + "}"


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    fields = {name: GOOD[name] for name in draw(st.sampled_from([["prompt"], ["messages"], ["tokens"], []]))}
    fields |= draw(st.dictionaries(st.sampled_from(FIELDS) | st.text(), RAW_VALUES, max_size=2))
    if "messages" in fields and draw(st.booleans()):
        fields["messages"] = draw(messages())
    return _object(fields).encode(errors="replace")


HEADERS = (
    *("x-request-id", "traceparent", "tracestate", "authorization", "accept", "content-type", "content-encoding"),
    *("origin", "host", "if-none-match", "range", "cookie", "forwarded", "x-forwarded-for", "x-forwarded-proto"),
    *("access-control-request-method", "access-control-request-headers", "user-agent", "accept-encoding", "te"),
)
HEADER_TEXT = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=60).map(str.strip)
HEADER_VALUES = HEADER_TEXT | st.sampled_from(
    [
        *(
            "application/json",
            "application/json; charset=utf-16",
            "text/plain",
            "*/*;q=nan",
            "text/plain;q=1e999,,;;q=",
        ),
        *("application/openmetrics-text; version=9", "gzip", "identity", "null", "http://[", "localhost:99999", "[::1"),
        *(
            "00-" + "f" * 32 + "-" + "f" * 16 + "-00-",
            "a=" + "b" * 5000,
            "Bearer \xff",
            "x" * 5000,
            "https",
            "::1, 1.2.3.4",
        ),
    ]
)
TARGETS = st.one_of(
    st.sampled_from(PATHS),
    st.sampled_from(
        ["/%00", "/%ff%fe", "/v1/models/%2e%2e/%2e%2e", "/v1/models/" + "a" * 5000, "/debug/requests/%F0%9F"]
    ),
    st.text("/.%aF019-{}[]'<>$;:@!~", max_size=30).map(lambda text: "/" + text),
)
QUERIES = st.sampled_from(
    ["", "?", "?limit=-1", "?limit=99999999999", "?limit=%00", "?outcome=%ff", "?slowest=é"]
) | st.text("abc=&;%09Ff+[]{}", max_size=20).map(lambda text: "?" + text)


def send(served: Served, method: str, target: str, headers: dict[str, str], body: bytes) -> httpx.Response:
    """Send a request, and read the answer unless it is a success, which may have no end."""
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    extensions = {"target": target.encode("ascii", "replace")}
    with served.http.stream(method, "/", headers=encoded, content=body, extensions=extensions) as response:
        if response.status_code >= 400 or target.startswith(tuple(TO_POST)):
            response.read()
        return response


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and response.request.method != "HEAD":
        error: dict[str, Any] = response.json()["error"]
        assert error["message"]
        assert len(error["message"]) < 1000
        assert error["request_id"] == response.headers["x-request-id"]
    assert b"\n" not in b"".join(value for _, value in response.headers.raw)


DEEP = nested(5000).encode()
ATTACK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)


@ATTACK
@given(st.sampled_from(TO_POST), bodies())
@example("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": ' + DEEP + b"}]}]}")
@example("/tokenize", b'{"messages": [{"role": "user", "content": [{"type": ' + DEEP + b"}]}]}")
@example("/v1/completions", b'{"prompt": "Hi", "tools": ' + DEEP + b"}")
@example("/detokenize", b'{"tokens": [5], "unknown": ' + DEEP + b"}")
def test_no_body_makes_the_server_fail(served: Served, path: str, body: bytes) -> None:
    check(send(served, "POST", path, {"content-type": "application/json"}, body))


@ATTACK
@given(
    st.sampled_from(["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "TRACE"]),
    TARGETS,
    QUERIES,
    st.dictionaries(st.sampled_from(HEADERS), HEADER_VALUES, max_size=3),
    st.sampled_from([b"", b"{}", b'{"prompt": "Hi"}']),
)
def test_no_method_path_query_or_header_makes_the_server_fail(
    served: Served, method: str, target: str, query: str, headers: dict[str, str], body: bytes
) -> None:
    check(send(served, method, target + query, headers, body))


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip", "deflate", "x" * 500])
def test_a_compressed_body_is_refused_by_its_encoding(served: Served, encoding: str) -> None:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    response = send(served, "POST", "/v1/completions", headers, b"\x1f\x8b\x08")
    assert response.status_code == 415
    assert encoding.lower()[:80] in response.json()["error"]["message"]
    check(response)


def test_identity_is_no_compression(served: Served) -> None:
    headers = {"content-encoding": "Identity", "content-type": "application/json"}
    assert send(served, "POST", "/v1/completions", headers, b'{"prompt": "Hi"}').status_code == 200
