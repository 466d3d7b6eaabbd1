"""What a gateway of child processes answers itself, even if no model is loaded: the list of models, and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oaiserve.checkpoints import demo
from oaiserve.config import Config
from oaiserve.errors import ModelNotFound
from oaiserve.plugins.gateway.children.metrics import merged
from oaiserve.plugins.gateway.children.models import ChildModels, Model
from oaiserve.plugins.gateway.client_request import ADAPTER_PATHS
from oaiserve.plugins.gateway.lists import LIST_SECONDS, all_models, credentials_in
from oaiserve.plugins.gateway.metrics import GatewayMetrics
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.upstream import Headers, NoAnswer
from oaiserve.plugins.gateway.watch import Watch
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.models import AnyModel, in_form, list_answer, name_in
from oaiserve.routes.models import closed_route as adapters_closed

MOST_METRICS_BYTES = 16 * 2**20


def routes(config: Config, models: ChildModels, watch: Watch, routers: Routers, created: int) -> list[Route]:
    """Return these routes. `created` is the Unix time in seconds that models have in the list."""

    async def every_model(request: Request) -> list[AnyModel]:
        """Return all models and adapters as the API shows them. Those that are not loaded have only some fields."""
        listed = await all_models(watch, routers, credentials_in(request))
        loaded = {} if isinstance(listed, Response) else {str(each["id"]): each for each in listed}
        own: dict[str, AnyModel] = {}
        for model in models.models.values():
            root = demo.HUB_ID if model.config.model == "demo" else model.config.model
            for name in model.config.model_names:
                known = {"id": name, "object": "model", "created": created, "owned_by": "oaiserve", "root": root}
                listed_model = loaded.pop(name, {})
                if "task" in listed_model:  # The files of a hub id say it only once they are here.
                    model.task = msgspec.json.decode(listed_model["task"])
                known |= {} if model.task is None else {"task": model.task}
                own[name] = {**known, **listed_model, "is_loaded": model.process is not None}
        return [*own.values(), *loaded.values()]

    async def list_models(request: Request) -> Response:
        return list_answer(request.scope, await every_model(request))

    async def retrieve_model(request: Request) -> Response:
        name = name_in(request.scope)
        listed = {model["id"]: model for model in await every_model(request)}
        model = listed.get(name) or listed.get(models.name_for(name))
        if model is None:
            raise ModelNotFound(name, *models.names)
        return json_response(in_form(request.scope, model))

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{model_id:path}", retrieve_model),
        # Child processes don't check who changes adapters, so the gateway does.
        *(Route(path, adapters_closed, methods=["POST"]) for path in (() if config.is_private else ADAPTER_PATHS)),
    ]


async def all_metrics(metrics: GatewayMetrics, watch: Watch, models: Iterable[Model], names_clients: bool) -> bytes:
    """Return the metrics of the gateway, and those of each child process that doesn't hang, with its model as a
    label."""
    headers = watch.headers if names_clients else []
    loaded = [model for model in models if model.process is not None and model.address.name not in watch.hung]
    texts = await asyncio.gather(*(_metrics_of(model, watch, headers) for model in loaded))
    by_name = {model.name: text for model, text in zip(loaded, texts, strict=True)}
    text = await run_in_threadpool(lambda: merged(metrics.render().decode(), by_name))
    return text.encode()


async def _metrics_of(model: Model, watch: Watch, headers: Headers) -> str:
    """Return the metrics of a child process; none if it has just ended, or does not answer in time."""
    with suppress(NoAnswer, KeyError):
        upstream = watch.upstreams[model.address.name]
        status, content = await upstream.get(b"/metrics", headers, MOST_METRICS_BYTES, LIST_SECONDS)
        return content.decode() if status == 200 else ""
    return ""
