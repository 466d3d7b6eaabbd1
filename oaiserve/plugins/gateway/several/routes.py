"""What the front answers itself, even if no model is loaded: the list of models, metrics, and lists for pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from oaiserve.checkpoints import demo
from oaiserve.config import Config
from oaiserve.errors import MODELS_PATH, ModelNotFound, Unavailable
from oaiserve.http.codings import page_response
from oaiserve.http.keys import Keyring
from oaiserve.plugins.gateway.client_request import ADAPTER_PATHS
from oaiserve.plugins.gateway.lists import CLIENTS_PATH, REQUESTS_PATH, Ask, all_clients, all_requests
from oaiserve.plugins.gateway.metrics import CONTENT_TYPE, FrontMetrics
from oaiserve.plugins.gateway.several.front import Front
from oaiserve.plugins.gateway.several.loaded import LoadedModel
from oaiserve.plugins.gateway.several.metrics import merged
from oaiserve.plugins.gateway.several.models import Model, Models
from oaiserve.routes.door.access import names_clients
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.models import AnyModel, in_form, list_answer, model_of, name_in
from oaiserve.routes.models import closed_route as adapters_closed


def routes(config: Config, front: Front, metrics: FrontMetrics, ring: Keyring | None, created: int) -> list[Route]:
    """Return these routes. `created` is the Unix time in seconds of models that are not loaded."""
    models = front.models

    async def ready(request: Request) -> Response:
        if front.is_draining:
            raise Unavailable("The server is shutting down.", retry_after_seconds=5)
        if hung := models.hung:
            raise Unavailable(f"The model '{hung[0]}' does not respond.", retry_after_seconds=5)
        return Response()

    async def show_metrics(request: Request) -> Response:
        loaded = models.loaded_by_name
        names_all = names_clients(request, ring)
        text = await run_in_threadpool(_rendered, metrics, loaded, names_all=names_all)
        return await page_response(request, text.encode(), CONTENT_TYPE)

    def every_model() -> list[AnyModel]:
        """Return all models and adapters as the API shows them. Those that are not loaded have only some fields."""
        return [*_own(models, created), *_adapters(models)]

    async def list_models(request: Request) -> Response:
        return list_answer(request.scope, every_model())

    async def retrieve_model(request: Request) -> Response:
        name = name_in(request.scope)
        listed = {model["id"]: model for model in every_model()}
        model = listed.get(name) or listed.get(models.name_for(name))
        if model is None:
            raise ModelNotFound(name, *models.names)
        return json_response(in_form(request.scope, model))

    def of_all(answer: Callable[[Ask, str], Awaitable[Response]]) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def route(request: Request) -> ASGIApp:
            if request.query_params.get("model"):
                return front
            return await answer(partial(front.ask, request), request.scope["query_string"].decode("latin-1"))

        return route

    lists = []
    if config.shows_dashboard:
        lists = [Route(REQUESTS_PATH, of_all(all_requests)), Route(CLIENTS_PATH, of_all(all_clients))]
    return [
        Route("/ready", ready),
        Route("/metrics", show_metrics),
        Route(MODELS_PATH, list_models),
        Route(f"{MODELS_PATH}/{{model_id:path}}", retrieve_model),
        *lists,
        # The routes of models see no difference between them and a server of one model.
        *(Route(path, adapters_closed, methods=["POST"]) for path in (() if config.is_private else ADAPTER_PATHS)),
    ]


def _own(models: Models, created: int) -> list[AnyModel]:
    shown: list[AnyModel] = []
    for model in models.by_name.values():
        loaded = model.loaded
        for name in model.config.model_names:
            if loaded is None:
                listed = _not_loaded(model, name, created)
            else:
                model.task = loaded.serving.task  # A hub id's files, which say it, may have been downloaded since.
                listed = msgspec.to_builtins(model_of(loaded.serving, None, name))
            shown.append({**listed, "is_loaded": loaded is not None})
    return shown


def _not_loaded(model: Model, name: str, created: int) -> AnyModel:
    root = demo.HUB_ID if model.config.model == "demo" else model.config.model
    known = {"id": name, "object": "model", "created": created, "owned_by": "oaiserve", "root": root}
    return known if model.task is None else known | {"task": model.task}


def _adapters(models: Models) -> list[AnyModel]:
    return [
        msgspec.to_builtins(model_of(loaded.serving, adapter, adapter.name))
        for loaded in models.loaded_by_name.values()
        for adapter in loaded.engine.adapters.served
    ]


def _rendered(metrics: FrontMetrics, loaded: dict[str, LoadedModel], *, names_all: bool) -> str:
    """Return the metrics of the front, and those of each loaded model, with its name as a label."""
    pages = {name: each.serving.telemetry.render("", names_all)[0].decode() for name, each in loaded.items()}
    return merged(metrics.render().decode(), pages)
