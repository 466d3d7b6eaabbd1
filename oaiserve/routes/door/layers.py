"""The middleware around the routes of a server and of a gateway."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from oaiserve.config import ServerOptions
from oaiserve.facts.trace import TraceContext
from oaiserve.http.keys import Keyring
from oaiserve.routes import adaptations
from oaiserve.routes.door.access import APIKeys, CountRefusal, Hosts, OpenPaths
from oaiserve.routes.door.middleware import Errors, PacedRefusals, RequestHeaders, TidyPath
from oaiserve.routes.pages import Pages
from oaiserve.runtime import Runtime

EXPOSED_HEADERS = (  # visible to the scripts of allowed pages
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
    *(
        "x-request-id",
        "request-id",
        "link",
        "x-max-tokens-cut-to",
        "x-oaiserve-read-again",
        "server-timing",
        "traceresponse",
        "openai-processing-ms",
        "retry-after",
    ),
    adaptations.HEADER,
)


def middleware(
    server: ServerOptions,
    ring: Keyring | None,
    pages: Pages,
    count_refused: CountRefusal,
    is_sampled: Callable[[TraceContext], bool] | None,
    runtime: Runtime,
) -> list[Middleware]:
    """Return the middleware, outermost first. A second `Errors` is inside CORS, so that web pages can read errors.
    `is_sampled` is None if another process answers, which knows the trace and the time."""
    chain = [
        Middleware(RequestHeaders, runtime=runtime, is_sampled=is_sampled),
        Middleware(PacedRefusals, clock_ns=runtime.clock_ns),
        Middleware(TidyPath),
        Middleware(Errors),
        Middleware(
            Hosts,
            listens_on=server.host,
            allowed=server.allowed_host,
            origins=server.cors_origin,
            count=count_refused,
        ),
    ]
    if server.cors_origin:
        allowed = Middleware(
            CORSMiddleware,
            allow_origins=server.cors_origin,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
        )
        chain += [allowed, Middleware(Errors)]
    if ring is not None:
        is_open = OpenPaths(pages, guard_all=server.guard_all)
        chain.append(Middleware(APIKeys, keys=ring, is_open=is_open, count=count_refused))
    return chain
