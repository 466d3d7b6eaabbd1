"""`create_gateway` builds the gateway's app: its own routes, the checks in front, and `Gateway` for all the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve import __version__
from oaiserve.config import RouteOptions
from oaiserve.errors import Unavailable
from oaiserve.facts.record import AccessRefusal
from oaiserve.routes.access import Hosts, Origins
from oaiserve.routes.middleware import Errors, TidyPath, json_response, render_http_exception, request_ids
from oaiserve.scale.gateway.gateway import Gateway
from oaiserve.scale.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from oaiserve.scale.gateway.watch import USUAL, Pace, Resolve, Watch, addresses_of
from oaiserve.scale.router import Router


class Ids:
    """Gives the request its ids, which the replica gets, too.

    The other headers of the server's own layer come from the replica.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = request_ids(scope)
        scope.setdefault("state", {}).update(state, send=send)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        await self.app(scope, receive, send_with_id)


class GatewayApp(NamedTuple):
    """The app, and its watch, which learns of the shutdown."""

    app: Starlette
    gateway: Gateway


def create_gateway(options: RouteOptions, resolve: Resolve = addresses_of, pace: Pace = USUAL) -> GatewayApp:
    """Return the gateway's app. `resolve` finds the replicas of a URL."""
    router = Router()
    watch = Watch(router, options.replica, options.replica_key, resolve, pace)
    metrics = GatewayMetrics(watch)
    gateway = Gateway(router, watch, metrics, options.body_limit, options.continue_streams)

    async def health(request: Request) -> Response:
        return Response()

    async def ready(request: Request) -> Response:
        if not gateway.is_ready:
            raise Unavailable("No replica is ready for requests.", retry_after_seconds=5)
        return Response()

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def show_metrics(request: Request) -> Response:
        return Response(await run_in_threadpool(metrics.render), headers={"content-type": CONTENT_TYPE})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch.run())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    def count_refused(reason: AccessRefusal) -> None:
        metrics.refused_access.labels(reason).inc()

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", version),
            Route("/metrics", show_metrics),
            Mount("", gateway),
        ],
        middleware=[
            Middleware(Ids),
            Middleware(Errors),
            Middleware(TidyPath),
            Middleware(Hosts, listens_on=options.host, allowed=options.allowed_host, count=count_refused),
            Middleware(Origins, origins=(), count=count_refused),
        ],
        exception_handlers={HTTPException: render_http_exception},
        lifespan=lifespan,
    )
    return GatewayApp(app, gateway)
