"""Builds gateways: the gateway's own routes, the checks in front, and `Gateway` for all the rest.

`create_gateway` is for servers that run elsewhere, and `create_gateway_of_models` for child processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from secrets import token_urlsafe
from time import process_time_ns

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from oaiserve import __version__
from oaiserve.checkpoints import demo
from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.hub import in_cache
from oaiserve.checkpoints.source import find_model
from oaiserve.commands.server_process import start_on
from oaiserve.config import Config
from oaiserve.engine.pooling import Task
from oaiserve.engine.start.task import find_task
from oaiserve.errors import StartupError, Unavailable
from oaiserve.facts.record import AccessRefusal
from oaiserve.facts.times import WallClock
from oaiserve.http.codings import page_response
from oaiserve.http.keys import Keyring
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import keyring, own_plugins, pages_of, routes_of, running
from oaiserve.plugins.gateway import model_routes, page
from oaiserve.plugins.gateway.capacity import ModelsCapacity
from oaiserve.plugins.gateway.children.folder import ModelsFolder
from oaiserve.plugins.gateway.children.models import ChildModels, Model
from oaiserve.plugins.gateway.gateway import Gateway
from oaiserve.plugins.gateway.lists import answers_of_all, credentials_in
from oaiserve.plugins.gateway.metrics import CONTENT_TYPE, GatewayMetrics, ModelMetrics
from oaiserve.plugins.gateway.options import ModelsOptions, RouteOptions
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.sources import Resolve, Url, addresses_of
from oaiserve.plugins.gateway.watch import USUAL, Pace, Watch, report_headers
from oaiserve.routes.door.access import names_clients
from oaiserve.routes.door.backend import Backend
from oaiserve.routes.door.layers import middleware
from oaiserve.routes.door.middleware import json_response, render_http_exception
from oaiserve.runtime import THREADS, Runtime
from oaiserve.standstill import watch_for_standstills
from oaiserve.storage.private import cache_folder
from oaiserve.storage.store_options import StoreOptions
from oaiserve.telemetry import make_tracing
from oaiserve.wire.address import Address

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # longest wait for a collector that does not answer
# A request gains nothing by an early move, because no other process has its model.
PACE_OF_MODELS = USUAL._replace(least_answer_seconds=USUAL.answer_seconds, resolve_seconds=3600.0)
JOIN_SECONDS = 0.005  # pause between two checks whether a process has joined


@dataclass(frozen=True, slots=True)
class Children:
    """The child processes of a gateway: its models, and the keys that it checks itself."""

    config: Config  # of the server as a whole
    models: ChildModels
    options: ModelsOptions
    plugins: Sequence[Plugin]  # those in front
    folder: ModelsFolder
    ring: Keyring | None
    runtime: Runtime

    @asynccontextmanager
    async def running(self, app: Starlette, gateway: Gateway) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.models.watch())]
        capacity = ModelsCapacity(gateway, self.models)
        app.state.backend = Backend(
            self.config,
            gateway,
            capacity,
            gateway.bodies,
            self.ring,
            capacity.has_others,
            self.runtime,
        )
        if not self.options.load_on_demand:
            tasks.append(asyncio.create_task(self.models.load_all()))
        if self.ring is not None:
            tasks.append(asyncio.create_task(self.ring.stay_fresh(self.runtime)))
        try:
            async with running(self.plugins, app):
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.models.close()
            self.folder.remove()
            if self.ring is not None:
                await self.ring.close()


async def health(request: Request) -> Response:
    return Response()


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


def create_gateway(
    options: RouteOptions, resolve: Resolve = addresses_of, pace: Pace = USUAL, runtime: Runtime = THREADS
) -> tuple[Starlette, Gateway]:
    """Return the app of a gateway for servers elsewhere, and the gateway, whose `drain` must be called at a shutdown.
    `resolve` finds a URL's replicas."""
    headers = report_headers(options.replica_key)
    routers = Routers()
    watch = Watch(routers, [Url(url, headers, resolve) for url in options.replica], headers, pace, runtime.clock_ns)
    return _create(watch, routers, options.config, options, own_plugins(), None, runtime)


def create_gateway_of_models(
    config: Config,
    configs: Mapping[str, Config],
    plugins: Sequence[Plugin] | None = None,
    runtime: Runtime = THREADS,
) -> tuple[Starlette, Gateway, ChildModels]:
    """Return the app of a gateway whose replicas are child processes, one for each model, the gateway, and the models.

    `config` has the settings of the server as a whole. Without `plugins`, it has those of oaiserve. Raises StartupError
    for files of keys.
    """
    options = config.of(ModelsOptions)
    parts = own_plugins() if plugins is None else plugins
    ring = keyring(parts, config)
    own_key = token_urlsafe() if config.needs_key else None  # for reports and metrics
    folder = ModelsFolder()  # It is removed even if the server does not start.
    path = folder.path
    store = config.of(StoreOptions)
    if store.stores_responses and store.response_store is None:
        store = replace(store, response_store=path / "responses")  # All processes share it.
    routers = Routers(is_strict=True)

    async def changed() -> None:
        await watch.look()
        while not watch.upstreams.keys() <= watch.joined:  # noqa: ASYNC110 - there is no event for all of them
            await asyncio.sleep(JOIN_SECONDS)

    children = [
        Model(
            name,
            _of_child(config, store, own_key),
            Address.of_socket(path / f"{number}.sock", name),
            _size(config),
            _task(config),
        )
        for number, (name, config) in enumerate(configs.items(), start=1)
    ]
    models = ChildModels(
        children,
        options,
        start_on,
        changed,
        routers.models_of,
        lambda name: name in watch.hung,
        runtime.clock_ns,
    )
    headers = report_headers(own_key)
    watch = Watch(routers, (models,), headers, PACE_OF_MODELS, runtime.clock_ns, logging.DEBUG)
    route = RouteOptions(body_limit=config.server.body_limit)
    in_front = [plugin for plugin in parts if plugin.inner.is_in_front]
    inside = Children(config.having(store), models, options, in_front, folder, ring, runtime)
    app, gateway = _create(watch, routers, config, route, parts, inside, runtime)
    return app, gateway, models


def _create(
    watch: Watch,
    routers: Routers,
    config: Config,
    options: RouteOptions,
    plugins: Iterable[Plugin],
    children: Children | None,
    runtime: Runtime,
) -> tuple[Starlette, Gateway]:
    metrics = GatewayMetrics(watch)
    models = None if children is None else children.models
    if models is not None:
        metrics.registry.register(ModelMetrics(models.models.values()))
    tracing = make_tracing(
        epoch_offset_ns=WallClock(runtime.unix_ns, runtime.clock_ns),
        version=__version__,
        count_spans=lambda result, number: metrics.spans.labels(result).inc(number),
        service="oaiserve-gateway",
        runtime=runtime,
    )
    gateway = Gateway(routers, watch, metrics, config, options, tracing, models, runtime)
    pages = pages_of(plugins).shown(None if config.shows_dashboard else page.hidden_by(models))

    async def ready(request: Request) -> Response:
        if not gateway.is_ready:
            raise Unavailable("No replica is ready for requests.", retry_after_seconds=5)
        if models is not None and (hung := models.hung):
            raise Unavailable(f"The model '{hung[0].name}' does not respond.", retry_after_seconds=5)
        return Response()

    async def show_metrics(request: Request) -> Response:
        if children is None:
            content = await run_in_threadpool(metrics.render)
        else:
            with_names = names_clients(request, children.ring)
            content = await model_routes.all_metrics(metrics, watch, children.models.models.values(), with_names)
        return await page_response(request, content, CONTENT_TYPE)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch.run())
        standing = asyncio.create_task(watch_for_standstills(log, "gateway", runtime.clock_ns, process_time_ns))
        try:
            if children is None:
                yield
            else:
                async with children.running(app, gateway):
                    yield
        finally:
            for task in (watching, standing):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await gateway.stop()
            if tracing is not None:
                await asyncio.to_thread(tracing.close, CLOSE_SECONDS)

    def count_refused(reason: AccessRefusal) -> None:
        metrics.refused_access.labels(reason).inc()

    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", show_metrics),
        *page.routes(watch, routers, metrics, config, models, gateway, pages, runtime),
    ]

    async def ask(request: Request, target: str) -> Mapping[int, bytes] | Response:
        return await answers_of_all(watch, target, credentials_in(request))

    of_plugins: list[BaseRoute] = []
    if children is not None:
        created = runtime.unix_ns() // 10**9
        routes += model_routes.routes(config, children.models, watch, routers, created)
        of_plugins = routes_of(children.plugins, children.config, {route.path for route in routes})
    behind = [plugin for plugin in plugins if children is None or not plugin.inner.is_in_front]
    of_plugins += routes_of(behind, config, {route.path for route in routes}, ask=ask)
    app = Starlette(
        routes=[*routes, *of_plugins, Mount("", gateway)],
        middleware=middleware(
            config.server,
            None if children is None else children.ring,
            pages,
            count_refused,
            None,
            runtime,
        ),
        exception_handlers={HTTPException: render_http_exception},
        lifespan=lifespan,
    )
    app.state.pages = pages
    app.state.runtime = runtime
    app.state.bodies = gateway.bodies
    app.state.count_refusal_delay = lambda delay_ns: metrics.refusal_delay.inc(delay_ns / 1e9)
    return app, gateway


def _of_child(config: Config, store: StoreOptions, own_key: str | None) -> Config:
    """Return the settings of a child process, which has a key for the gateway and shares the gateway's store."""
    keys = config.server.api_key if own_key is None else (*config.server.api_key, own_key)
    return replace(config, server=replace(config.server, api_key=keys)).having(store)


def _task(config: Config) -> Task | None:
    """Return the task of a model by its settings or files, or None if these are not on this disk or can't be read."""
    if config.engine.task != "auto":
        return config.engine.task
    if config.model == "demo":
        return "generate"
    source = find_model(config.model)
    with suppress(BadFile, OSError, StartupError):  # The start of the model reports them.
        return find_task(source if source.is_local else in_cache(source), "auto")
    return None


def _size(config: Config) -> int:
    """Return the size of a model's local files, as an estimate of its memory until that is measured."""
    source = None if config.model == "demo" else find_model(config.model)
    path = cache_folder() / "models" / demo.NAME if source is None else source.path
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else ()
    return sum(file.stat().st_size for file in files if file.is_file())
