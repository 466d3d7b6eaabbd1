"""`create_gateway` builds the gateway's app: its own routes, the checks in front, and `Gateway` for all the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from oaiserve import __version__
from oaiserve.config import RouteOptions
from oaiserve.errors import StartupError, Unavailable
from oaiserve.facts.record import AccessRefusal
from oaiserve.facts.times import monotonic_ns
from oaiserve.http.codings import page_response
from oaiserve.routes.access import Hosts
from oaiserve.routes.middleware import (
    Errors,
    PacedRefusals,
    RequestHeaders,
    TidyPath,
    json_response,
    render_http_exception,
)
from oaiserve.scale.gateway import page
from oaiserve.scale.gateway.gateway import Gateway
from oaiserve.scale.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from oaiserve.scale.gateway.watch import USUAL, Pace, Resolve, Watch, addresses_of
from oaiserve.scale.routers import Routers
from oaiserve.telemetry import make_tracing

CLOSE_SECONDS = 5.0  # the longest wait for a collector that does not answer


async def health(request: Request) -> Response:
    return Response()


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


def create_gateway(
    options: RouteOptions, resolve: Resolve = addresses_of, pace: Pace = USUAL
) -> tuple[Starlette, Gateway]:
    """Return the gateway's app, and the gateway, which learns of the shutdown. `resolve` finds a URL's replicas."""
    router = Routers()
    watch = Watch(router, options.replica, options.replica_key, resolve, pace)
    metrics = GatewayMetrics(watch)
    try:
        tracing = make_tracing(
            epoch_offset_ns=time.time_ns() - monotonic_ns(),
            version=__version__,
            count_spans=lambda result, number: metrics.spans.labels(result).inc(number),
            service="oaiserve-gateway",
        )
    except ValueError as error:
        raise StartupError(f"An OTEL_ variable has a value that OpenTelemetry rejects: {error}") from error
    gateway = Gateway(router, watch, metrics, options, tracing)

    async def ready(request: Request) -> Response:
        if not gateway.is_ready:
            raise Unavailable("No replica is ready for requests.", retry_after_seconds=5)
        return Response()

    async def show_metrics(request: Request) -> Response:
        return await page_response(request, await run_in_threadpool(metrics.render), CONTENT_TYPE)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch.run())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            if tracing is not None:
                await asyncio.to_thread(tracing.close, CLOSE_SECONDS)

    def count_refused(reason: AccessRefusal) -> None:
        metrics.refused_access.labels(reason).inc()

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", version),
            Route("/metrics", show_metrics),
            *page.routes(watch, router, metrics, options.server, lambda: gateway.is_draining),
            Mount("", gateway),
        ],
        middleware=[
            Middleware(RequestHeaders),
            Middleware(PacedRefusals),
            Middleware(Errors),
            Middleware(TidyPath),
            Middleware(Hosts, listens_on=options.host, allowed=options.allowed_host, origins=(), count=count_refused),
        ],
        exception_handlers={HTTPException: render_http_exception},
        lifespan=lifespan,
    )
    return app, gateway
