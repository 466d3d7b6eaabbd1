"""Builds gateways: the gateway's own routes, the checks in front, and `Gateway` for all the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import process_time_ns

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from oaiserve import __version__
from oaiserve.errors import Unavailable
from oaiserve.facts.times import WallClock
from oaiserve.http.codings import page_response
from oaiserve.plugin_loading import own_plugins, pages_of, routes_of
from oaiserve.plugins.gateway import page
from oaiserve.plugins.gateway.basics import front_app, health, running_tasks, version
from oaiserve.plugins.gateway.gateway import Gateway
from oaiserve.plugins.gateway.lists import answers_of_all, credentials_in
from oaiserve.plugins.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.sources import Resolve, Url, addresses_of
from oaiserve.plugins.gateway.watch import USUAL, Pace, Watch, report_headers
from oaiserve.runtime import THREADS, Runtime
from oaiserve.standstill import watch_for_standstills
from oaiserve.telemetry import make_tracing

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # longest wait for a collector that does not answer


def create_gateway(
    options: RouteOptions, resolve: Resolve = addresses_of, pace: Pace = USUAL, runtime: Runtime = THREADS
) -> tuple[Starlette, Gateway]:
    """Return the app of a gateway for servers elsewhere, and the gateway, whose `drain` must be called at a shutdown.
    `resolve` finds a URL's replicas."""
    headers = report_headers(options.replica_key)
    config = options.config
    plugins = own_plugins()
    routers = Routers()
    watch = Watch(routers, [Url(url, headers, resolve) for url in options.replica], headers, pace, runtime.clock_ns)
    metrics = GatewayMetrics(watch)
    tracing = make_tracing(
        epoch_offset_ns=WallClock(runtime.unix_ns, runtime.clock_ns),
        version=__version__,
        count_spans=lambda result, number: metrics.spans.labels(result).inc(number),
        service="oaiserve-gateway",
        runtime=runtime,
    )
    gateway = Gateway(routers, watch, metrics, config, options, tracing, runtime)
    pages = pages_of(plugins).shown(None if config.shows_dashboard else page.closed_route)

    async def ready(request: Request) -> Response:
        if not gateway.is_ready:
            raise Unavailable("No replica is ready for requests.", retry_after_seconds=5)
        return Response()

    async def show_metrics(request: Request) -> Response:
        return await page_response(request, await run_in_threadpool(metrics.render), CONTENT_TYPE)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        standstills = watch_for_standstills(log, "gateway", runtime.clock_ns, process_time_ns)
        try:
            async with running_tasks(watch.run(), standstills):
                yield
        finally:
            await gateway.stop()
            if tracing is not None:
                await asyncio.to_thread(tracing.close, CLOSE_SECONDS)

    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", show_metrics),
        *page.routes(watch, routers, metrics, config, gateway, pages, runtime),
    ]

    async def ask(request: Request, target: str) -> Mapping[int, bytes] | Response:
        return await answers_of_all(watch, target, credentials_in(request))

    of_plugins = routes_of(plugins, config, {route.path for route in routes}, ask=ask)
    app = front_app(
        config,
        [*routes, *of_plugins, Mount("", gateway)],
        lifespan,
        pages=pages,
        bodies=gateway.bodies,
        keys=None,
        count_refused=metrics.count_refused,
        count_refusal_delay=metrics.count_refusal_delay,
        is_sampled=None,
        runtime=runtime,
    )
    return app, gateway
