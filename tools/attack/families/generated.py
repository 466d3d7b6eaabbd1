"""An attack by generated requests to all routes: bodies fit the schema that the server publishes, nearly fit it, or are
anything. What is sent is a function of the seed."""

from __future__ import annotations

import json
import re
import time
from functools import cache

from hypothesis import strategies as st
from starlette.routing import Route

from oaiserve.app import routes
from oaiserve.config import Config
from oaiserve.routes.openapi import document
from tools.attack import schema
from tools.attack.attack import HI, REFUSED, Family, Number, Sent, outcomes, request

GENERATED = Family("generated", "one request ends the engine")
FEED = "/dashboard/feed"  # The answer of this route does not end.
FEW = st.integers(1, 4)
LIMITS = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), FEW)
PROMPTS = schema.TEXT | st.sampled_from(["Hi", ["Hi", "Ho"], [7, 8], [[7]]])
USUAL = {"prompt": PROMPTS, "messages": st.just(HI), "input": st.just("Hi")}
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
SAFE = st.text("abcXYZ019-._~%/", max_size=12) | st.sampled_from(["%00", "%ff", "..", "%2e%2e", "%0d%0a", "index.html"])
QUERY = st.lists(
    st.tuples(st.sampled_from(["slowest", "outcome", "id", "limit", "format", "steps", "seconds", "name[]", ""]), SAFE),
    max_size=3,
)
HEADERS = (
    ("content-type", "text/plain"), ("content-type", "application/json; charset=utf-16"), ("content-encoding", "gzip"),
    ("x-request-id", "a b"), ("x-request-id", "x" * 500), ("traceparent", "00-zz"), ("tracestate", "=" * 600),
    ("accept", "text/plain;q=1e9,*/*;q=x"), ("accept", "application/openmetrics-text"), ("origin", "null"),
    ("if-none-match", '"x"'), ("expect", "100-continue"), ("authorization", "Bearer wrong"), ("range", "bytes=9-1"),
    ("host", ""), ("host", "attacker.example"), ("cookie", "a=b"),
)  # fmt: skip


@cache
def bodies() -> dict[str, st.SearchStrategy[object]]:
    """Return strategies of the bodies that fit a route's schema, by its path: any, and such as are answered."""
    published = document(routes(Config("demo")), version="", needs_key=True)
    strategies: dict[str, st.SearchStrategy[object]] = {}
    for path, name in schema.bodies(published).items():
        fields = published["components"]["schemas"][name]["properties"]
        limits = {field: LIMITS[field] for field in LIMITS.keys() & fields}
        usual = {field: USUAL[field] for field in USUAL.keys() & fields}
        strategies[path] = schema.fitting(published, name, limits) | schema.fitting(published, name, limits | usual)
    return strategies


def contents(path: str) -> st.SearchStrategy[bytes]:
    """Return bodies: mostly of the route's own type, some with changes, a few of another type or no JSON at all."""
    own = bodies().get(path, schema.ANYTHING)
    changed = schema.mutated(own) if path in bodies() else own
    cut = st.tuples(own.map(encoded), st.integers(0, 60)).map(lambda pair: pair[0][: -pair[1] or None])
    return st.one_of(own.map(encoded), own.map(encoded), changed.map(encoded), changed.map(encoded),
                     schema.ANYTHING.map(encoded), cut, st.binary(max_size=40))  # fmt: skip


def encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=True).encode(errors="replace")


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    known = [(route.path, method) for route in routes(Config("demo")) if isinstance(route, Route)
             for method in sorted(route.methods or ()) if route.path != FEED]  # fmt: skip
    # The routes with a body of their own get half of all requests.
    path, method = draw(st.sampled_from([(path, "POST") for path in bodies()]) | st.sampled_from(known))
    if draw(st.integers(0, 19)) == 0:
        method = draw(st.sampled_from(METHODS))
    body = draw(contents(path)) if method == "POST" else b""
    path = re.sub(r"\{[^}]*\}", lambda _: draw(SAFE), path)
    if draw(st.integers(0, 3)) == 0:
        path += "?" + "&".join(f"{name}={value}" for name, value in draw(QUERY))
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=2)) if draw(st.integers(0, 4)) == 0 else []
    return request(method, path, body, dict(headers))


def generate(seed: int, number: int) -> list[bytes]:
    """Return a number of requests, as a function of the seed."""
    return schema.drawn(requests(), seed, number)


@GENERATED.burst("5,000 generated requests to all routes", REFUSED | outcomes(*range(200, 410)), 16,
                 server="short answers", answer_seconds=90, limit_seconds=900, is_work=True)  # fmt: skip
def generated(number: Number) -> list[Sent]:
    return [*generate(time.time_ns(), number(5_000, 300))]
