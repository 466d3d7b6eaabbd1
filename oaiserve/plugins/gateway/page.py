"""The gateway's pages: those of a server, with a live page of its fleet. Replicas are shown by numbers, with their
addresses only if the gateway listens only on this machine."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from oaiserve import __version__
from oaiserve.config import Config
from oaiserve.plugins.gateway.feed import FleetFeed
from oaiserve.plugins.gateway.gateway import Gateway
from oaiserve.plugins.gateway.metrics import GatewayMetrics, counts
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.samples import FleetSamples, replicas_of
from oaiserve.plugins.gateway.upstream import Upstream
from oaiserve.plugins.gateway.watch import Watch
from oaiserve.plugins.shared.feed import feed_response
from oaiserve.routes.operation import closed
from oaiserve.routes.pages import Pages
from oaiserve.routes.root import answer_root
from oaiserve.runtime import Runtime

closed_route = closed(
    "{path} shows the load and the requests of all replicas, so it is there only where --host is this machine alone, "
    "as in 127.0.0.1, or with --open-dashboard."
)


def routes(
    watch: Watch,
    routers: Routers,
    metrics: GatewayMetrics,
    config: Config,
    gateway: Gateway,
    pages: Pages,
    runtime: Runtime,
) -> list[Route]:
    """Return the routes of these pages: the chat, which any replica answers, and the live page of the fleet."""

    async def root(request: Request) -> Response:
        return await answer_root(request, config, __version__, pages)

    def fleet() -> dict[str, Any]:
        sent = counts(metrics.choices, "replica")
        now_ns = runtime.clock_ns()
        replicas = [_shown(upstream, watch, routers, sent, now_ns) for upstream in watch.upstreams.values()]
        if config.is_private:
            for replica, upstream in zip(replicas, watch.upstreams.values(), strict=True):
                replica["address"] = upstream.name
        return {
            "requests": counts(metrics.requests, "ending"),
            "continued": counts(metrics.continued, "result"),
            "replicas": sorted(replicas, key=itemgetter("number")),
            "has_children": False,
        }

    fleet_samples = FleetSamples(partial(replicas_of, watch), runtime.clock_ns)
    fleet_feed = FleetFeed(fleet_samples, fleet, lambda: gateway.is_draining, runtime.unix_ns)

    async def feed(request: Request) -> ASGIApp:
        return feed_response(request, fleet_feed, fleet_feed.events())

    root_route = Route("/", root)
    if config.shows_dashboard:
        return [root_route, *pages.routes, Route("/dashboard/feed", feed)]
    paths = ["/debug/requests", "/debug/requests/{request_id}", "/debug/clients"]
    return [root_route, *pages.routes, *(Route(path, closed_route) for path in paths)]


def _shown(upstream: Upstream, watch: Watch, routers: Routers, sent: dict[str, int], now_ns: int) -> dict[str, Any]:
    """Return a replica as the page shows it. The numbers from its reports are null without one."""
    name = upstream.name
    number = upstream.number
    report = upstream.report
    is_up = False
    if name not in watch.joined:
        state = "Not reached yet"
    elif now_ns < upstream.out_until_ns:
        state = "Paused, because its requests failed"
    elif name in watch.silent:
        state = "Not responding"
    else:
        is_up = True
        state = "Up" if report is not None else "Up, without reports"
    shown = {"number": number, "state": state, "is_up": is_up, "models": routers.models_of(name)}
    shown |= {"num_sent": sent.get(str(number), 0), "num_open": upstream.num_open}
    return shown | {name: getattr(report, name, None) for name in ("num_running", "num_waiting", "kv_use")}
