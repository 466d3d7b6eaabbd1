"""What a gateway of child processes answers itself, even if no model is loaded: the list of models, and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oaiserve.checkpoints import demo
from oaiserve.config import ServerOptions
from oaiserve.errors import ModelNotFound
from oaiserve.plugins.gateway.children.metrics import merged
from oaiserve.plugins.gateway.children.models import ChildModels, Model
from oaiserve.plugins.gateway.client_request import ADAPTER_PATHS
from oaiserve.plugins.gateway.lists import LIST_SECONDS, all_models
from oaiserve.plugins.gateway.metrics import GatewayMetrics
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.watch import Watch
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.models import AnyModel, in_form, list_answer, name_in
from oaiserve.routes.models import closed_route as adapters_closed
from oaiserve.wire.upstream import NoAnswer

MOST_METRICS_BYTES = 16 * 2**20


def routes(server: ServerOptions, models: ChildModels, watch: Watch, routers: Routers) -> list[Route]:
    created = int(time.time())

    async def every_model(request: Request) -> list[AnyModel]:
        """Return all models and adapters as the API shows them. Those that are not loaded have only some fields."""
        credentials = [header for header in request.scope["headers"] if header[0] in (b"authorization", b"x-api-key")]
        listed = await all_models(watch, routers, credentials)
        loaded = {} if isinstance(listed, Response) else {str(each["id"]): each for each in listed}
        own: dict[str, AnyModel] = {}
        for model in models.models.values():
            root = demo.HUB_ID if model.config.model == "demo" else model.config.model
            for name in model.config.model_names:
                known = {"id": name, "object": "model", "created": created, "owned_by": "oaiserve", "root": root}
                known |= {} if model.task is None else {"task": model.task}
                own[name] = {**known, **loaded.pop(name, {}), "is_loaded": model.process is not None}
        return [*own.values(), *loaded.values()]

    async def list_models(request: Request) -> Response:
        return list_answer(request.scope, await every_model(request))

    async def retrieve_model(request: Request) -> Response:
        name = name_in(request)
        for model in await every_model(request):
            if model["id"] == name:
                return json_response(in_form(request.scope, model))
        raise ModelNotFound(name, *models.names)

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{model_id:path}", retrieve_model),
        # Child processes don't check who changes adapters, so the gateway does.
        *(Route(path, adapters_closed, methods=["POST"]) for path in (() if server.is_private else ADAPTER_PATHS)),
    ]


async def all_metrics(metrics: GatewayMetrics, watch: Watch, models: Iterable[Model]) -> bytes:
    """Return the metrics of the gateway, and those of each child process with its model as a label."""
    loaded = [model for model in models if model.process is not None]
    texts = await asyncio.gather(*(_metrics_of(model, watch) for model in loaded))
    by_name = {model.name: text for model, text in zip(loaded, texts, strict=True)}
    text = await run_in_threadpool(lambda: merged(metrics.render().decode(), by_name))
    return text.encode()


async def _metrics_of(model: Model, watch: Watch) -> str:
    """Return the metrics of a child process; none if it has just ended, or does not answer in time."""
    with suppress(NoAnswer, KeyError):
        upstream = watch.upstreams[model.address.name]
        status, content = await upstream.get(b"/metrics", watch.headers, MOST_METRICS_BYTES, LIST_SECONDS)
        return content.decode() if status == 200 else ""
    return ""
