"""`create_app` builds the front of several models: each request goes to the process of its model.

The processes check parameters and count tokens as a server of one model does. The front has what is of the whole
server: names and keys, the list of models, and all metrics at one address.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_urlsafe

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from oaiserve import __version__
from oaiserve.app import keyring, middleware, refresh_keys
from oaiserve.config import Config, ModelsOptions, RouteOptions, ServerOptions
from oaiserve.errors import ModelNotFound
from oaiserve.facts.record import AccessRefusal
from oaiserve.files import demo
from oaiserve.files.private import cache_folder
from oaiserve.files.source import find_model
from oaiserve.http.codings import page_response
from oaiserve.routes import dashboard, debug, keys
from oaiserve.routes.middleware import json_response, render_http_exception
from oaiserve.routes.models import AnyModel, in_form, list_answer
from oaiserve.scale.gateway.app import health, version
from oaiserve.scale.gateway.gateway import Gateway
from oaiserve.scale.gateway.lists import all_models
from oaiserve.scale.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from oaiserve.scale.gateway.upstream import Address, BadAnswer, CutOff, Unreachable
from oaiserve.scale.gateway.watch import Pace, Watch
from oaiserve.scale.routers import Routers
from oaiserve.scale.several.loaded import LoadedModels
from oaiserve.scale.several.metrics import merged
from oaiserve.scale.several.process import ModelProcess

# A process that is silent is not left out: there is no other one with its model. Its own watchdog sees a hang.
PACE = Pace(report_seconds=1.0, answer_seconds=600.0, least_answer_seconds=600.0, resolve_seconds=3600.0)
MOST_METRICS_BYTES = 16 * 2**20
JOIN_SECONDS = 0.005  # between two looks at whether a process has been found


def create_app(
    server: ServerOptions, configs: Mapping[str, Config], options: ModelsOptions
) -> tuple[Starlette, Gateway, LoadedModels]:
    """Return the app, its gateway, which learns of the shutdown, and the models. Raises StartupError for files of
    keys."""
    ring, key_store = keyring(server)
    own_key = token_urlsafe() if server.needs_key else None  # by which this process asks for reports and metrics
    folder = Path(tempfile.mkdtemp(prefix="oaiserve-"))  # of what the processes have in common
    served = {
        name: (_of_process(config, own_key, folder), _num_bytes(config.model)) for name, config in configs.items()
    }
    routers = Routers(is_strict=True)

    async def addresses(url: str) -> Iterable[Address]:
        return models.addresses

    async def changed() -> None:
        await watch.look()
        while not watch.upstreams.keys() <= watch.joined:  # noqa: ASYNC110 - there is no event for all of them
            await asyncio.sleep(JOIN_SECONDS)

    watch = Watch(routers, ("http://models",), own_key, addresses, PACE, logging.DEBUG)
    models = LoadedModels(served, options, ModelProcess.start, changed)
    metrics = GatewayMetrics(watch)
    front = RouteOptions(body_limit=server.body_limit)
    gateway = Gateway(routers, watch, metrics, front, None, models)
    created = int(time.time())

    async def every_model(request: Request) -> list[AnyModel]:
        """Return all models and adapters as the API shows them: of those that are not loaded, only what is known."""
        listed = await all_models(watch, routers, _credentials(request))
        found = {} if isinstance(listed, Response) else {str(each["id"]): each for each in listed}
        own: dict[str, AnyModel] = {}
        for model in models.models.values():
            root = demo.HUB_ID if model.config.model == "demo" else model.config.model
            for name in model.config.model_names:
                known = {"id": name, "object": "model", "created": created, "owned_by": "oaiserve", "root": root}
                own[name] = {**known, **found.pop(name, {}), "is_loaded": model.process is not None}
        return [*own.values(), *found.values()]

    async def list_models(request: Request) -> Response:
        return list_answer(request.scope, await every_model(request))

    async def retrieve_model(request: Request) -> Response:
        name = request.path_params["model_id"]
        for model in await every_model(request):
            if model["id"] == name:
                return json_response(in_form(request.scope, model))
        raise ModelNotFound(name, *models.names)

    async def show_metrics(request: Request) -> Response:
        texts = {}
        for model in models.models.values():
            if model.process is not None:
                with suppress(Unreachable, BadAnswer, CutOff, KeyError):  # it ends just now
                    upstream = watch.upstreams[model.process.address.name]
                    _, content = await upstream.get(b"/metrics", _authorization(own_key), MOST_METRICS_BYTES)
                    texts[model.name] = content.decode()
        text = await run_in_threadpool(lambda: merged(metrics.render().decode(), texts, [*models.models.values()]))
        return await page_response(request, text.encode(), CONTENT_TYPE)

    def count_refused(reason: AccessRefusal) -> None:
        metrics.refused_access.labels(reason).inc()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(watch.run()), asyncio.create_task(models.watch())]
        if not options.load_on_demand:
            tasks.append(asyncio.create_task(models.load_all()))
        if ring is not None:
            tasks.append(asyncio.create_task(refresh_keys(ring)))
        try:
            yield
        finally:
            for task in tasks[2:]:
                task.cancel()
            await models.close()
            for task in tasks[:2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            shutil.rmtree(folder)
            if key_store is not None:
                await key_store.close()

    async def list_keys(request: Request) -> Response:
        return await keys.answer(key_store)

    async def root(request: Request) -> Response:
        return await dashboard.answer_root(request, server, __version__)

    # The pages work even if no model is loaded. The feed and /debug are those of one process.
    closed = None if server.shows_dashboard else debug.closed_route
    inside = [] if closed is None else [Route(f"{path}/{{rest:path}}", closed) for path in ("/dashboard", "/debug")]
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", health),
            Route("/version", version),
            Route("/metrics", show_metrics),
            Route("/admin/keys", keys.closed_route if key_store is None else list_keys),
            Route("/v1/models", list_models),
            Route("/v1/models/{model_id:path}", retrieve_model),
            Route("/", root),
            *dashboard.page_routes(closed),
            *inside,
            Mount("", gateway),
        ],
        middleware=middleware(server, ring, count_refused, None),
        exception_handlers={HTTPException: render_http_exception},
        lifespan=lifespan,
    )
    return app, gateway, models


def _of_process(config: Config, own_key: str | None, folder: Path) -> Config:
    """Return the settings of a process: it has a key for this one, and a store of responses with the others."""
    server = config.server
    if own_key is not None:
        server = replace(server, api_key=(*server.api_key, own_key))
    if server.stores_responses and server.response_store is None:
        server = replace(server, response_store=folder / "responses")
    return replace(config, server=server)


def _num_bytes(model: str) -> int:
    """Return the bytes of a model's files, as far as they are here: about what it takes until that is measured."""
    source = None if model == "demo" else find_model(model)
    path = cache_folder() / "models" / demo.NAME if source is None else source.path
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else ()
    return sum(file.stat().st_size for file in files if file.is_file())


def _authorization(key: str | None) -> list[tuple[bytes, bytes]]:
    return [] if key is None else [(b"authorization", f"Bearer {key}".encode())]


def _credentials(request: Request) -> list[tuple[bytes, bytes]]:
    return [header for header in request.scope["headers"] if header[0] in (b"authorization", b"x-api-key")]
