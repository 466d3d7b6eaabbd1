"""The gateway's page of its fleet: what became of requests, and the replicas by number, never by address."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oaiserve import __version__
from oaiserve.config import ServerOptions
from oaiserve.facts.times import monotonic_ns
from oaiserve.routes import dashboard
from oaiserve.routes.middleware import json_response
from oaiserve.routes.operation import closed
from oaiserve.scale.gateway.metrics import GatewayMetrics, counts
from oaiserve.scale.gateway.upstream import Upstream
from oaiserve.scale.gateway.watch import Watch
from oaiserve.scale.routers import Routers

_CLOSED = (
    "{path} shows the load of all replicas, so it is there only where --host is this machine alone, as in 127.0.0.1, "
    "or with --open-dashboard."
)


def routes(watch: Watch, routers: Routers, metrics: GatewayMetrics, server: ServerOptions) -> list[Route]:
    """Return the routes of the pages: the chat, which any replica answers, and the live page of the fleet."""

    async def root(request: Request) -> Response:
        return await dashboard.answer_root(request, server, __version__)

    async def fleet(request: Request) -> Response:
        sent = counts(metrics.choices, "replica")
        replicas = [_shown(upstream, watch, routers, sent) for upstream in watch.upstreams.values()]
        found = {
            "version": __version__,
            "requests": counts(metrics.requests, "ending"),
            "continued": counts(metrics.continued, "result"),
            "replicas": sorted(replicas, key=itemgetter("number")),
        }
        return json_response(found, headers={"cache-control": "no-store"})

    closed_route = None if server.shows_dashboard else closed(_CLOSED)
    pages = dashboard.page_routes(closed_route, live="fleet.html")
    return [Route("/", root), *pages, Route("/dashboard/fleet", closed_route or fleet)]


def _shown(upstream: Upstream, watch: Watch, routers: Routers, sent: dict[str, int]) -> dict[str, Any]:
    """Return a replica as the page shows it. What only its reports tell is null without one."""
    name, number, report = upstream.name, upstream.number, upstream.report
    if name not in watch.joined:
        state = "not reached yet"
    elif monotonic_ns() < upstream.out_until_ns:
        state = "left out, as its requests failed"
    elif name in watch.silent:
        state = "silent"
    else:
        state = "takes requests" if report is not None else "takes requests, gives no reports"
    shown = {"number": number, "state": state, "models": routers.models_of(name)}
    shown |= {"num_sent": sent.get(str(number), 0), "num_open": upstream.num_open}
    return shown | {told: getattr(report, told, None) for told in ("num_running", "num_waiting", "kv_use")}
