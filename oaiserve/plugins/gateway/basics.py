"""What fronts without a model of their own have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from oaiserve import __version__
from oaiserve.config import Config
from oaiserve.facts.record import AccessRefusal
from oaiserve.facts.trace import TraceContext
from oaiserve.http.keys import Keyring
from oaiserve.plugins.gateway.metrics import FrontMetrics, GatewayMetrics
from oaiserve.routes.door.layers import middleware
from oaiserve.routes.door.middleware import json_response, render_http_exception
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.pages import Pages
from oaiserve.runtime import Runtime


def front_app(
    config: Config,
    routes: Sequence[BaseRoute],
    metrics: GatewayMetrics | FrontMetrics,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    *,
    pages: Pages,
    bodies: Bodies,
    keys: Keyring | None,
    is_sampled: Callable[[TraceContext], bool] | None,
    runtime: Runtime,
) -> Starlette:
    """Return the app of a front, with the checks of requests before its routes."""

    def count_refused(reason: AccessRefusal) -> None:
        metrics.refused_access.labels(reason).inc()

    app = Starlette(
        routes=routes,
        middleware=middleware(config.server, keys, pages, count_refused, is_sampled, runtime),
        exception_handlers={HTTPException: render_http_exception},
        lifespan=lifespan,
    )
    app.state.pages = pages
    app.state.runtime = runtime
    app.state.bodies = bodies
    app.state.count_refusal_delay = lambda delay_ns: metrics.refusal_delay.inc(delay_ns / 1e9)
    return app


async def health(request: Request) -> Response:
    return Response()


async def version(request: Request) -> Response:
    return json_response({"version": __version__})
