"""The pages of several models: those of a server, with a live page of all models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from oaiserve import __version__
from oaiserve.config import Config
from oaiserve.plugins.gateway.feed import FleetFeed
from oaiserve.plugins.gateway.samples import FleetSamples, Get
from oaiserve.plugins.gateway.several.front import Front
from oaiserve.plugins.gateway.several.models import Model
from oaiserve.plugins.shared.feed import feed_response
from oaiserve.routes import debug
from oaiserve.routes.door.own_requests import own_scope
from oaiserve.routes.pages import Pages
from oaiserve.routes.root import answer_root
from oaiserve.runtime import Runtime


def routes(config: Config, front: Front, pages: Pages, runtime: Runtime) -> list[Route]:
    """Return the routes of these pages. The feed of one model comes from its own routes."""

    async def root(request: Request) -> Response:
        return await answer_root(request, config, __version__, pages)

    def sources() -> Mapping[str, Get]:
        loaded = front.models.loaded_by_name
        return {name: partial(each.get, own_scope(each.app, "", runtime.token_hex)) for name, each in loaded.items()}

    def fleet() -> dict[str, Any]:
        numbered = enumerate(front.models.by_name.values(), start=1)
        replicas = [_shown(number, model) for number, model in numbered]
        return {"requests": {}, "continued": {}, "replicas": replicas, "has_children": True}

    samples = FleetSamples(sources, runtime.clock_ns)
    fleet_feed = FleetFeed(samples, fleet, lambda: front.is_draining, runtime.unix_ns)

    async def feed(request: Request) -> ASGIApp:
        if request.query_params.get("model"):
            return front
        return feed_response(request, fleet_feed, fleet_feed.events())

    root_route = Route("/", root)
    if config.shows_dashboard:
        return [root_route, *pages.routes, Route("/dashboard/feed", feed)]
    hidden = ("/debug/{rest:path}", "/dashboard/{rest:path}")
    return [root_route, *pages.routes, *(Route(path, debug.closed_route) for path in hidden)]


def _shown(number: int, model: Model) -> dict[str, Any]:
    """Return a model as the page shows it. The numbers are null while it is not loaded."""
    shown: dict[str, Any] = {"number": None, "models": model.config.model_names, "is_up": False}
    numbers = ("num_sent", "num_open", "num_running", "num_waiting", "kv_use")
    if (loaded := model.loaded) is None:
        state = "Loading" if model.loading is not None else "Not loaded"
        return {**shown, "state": state, **dict.fromkeys(numbers)}
    engine = loaded.engine
    shown |= {"number": number, "is_up": not (engine.hang or engine.pause)}
    now = engine.snapshot()
    values = (model.num_requests, model.num_users, now.num_running, now.num_waiting, now.kv_usage)
    shown |= dict(zip(numbers, values, strict=True))
    return {**shown, "state": "Up" if shown["is_up"] else "Not responding"}
