"""Builds the app in front of several models: the checks of requests, its own routes, and `Front` for all the rest."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from time import process_time_ns

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route

from oaiserve.checkpoints import demo
from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.hub import in_cache
from oaiserve.checkpoints.source import find_model
from oaiserve.config import Config
from oaiserve.engine.start.task import find_task
from oaiserve.engine.types.pooling import Task
from oaiserve.errors import StartupError
from oaiserve.facts.trace import TraceContext
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import keyring, own_plugins, pages_of, routes_of, running
from oaiserve.plugins.gateway.basics import front_app, health, running_tasks, version
from oaiserve.plugins.gateway.metrics import FrontMetrics
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.plugins.gateway.several import pages as own_pages
from oaiserve.plugins.gateway.several import routes as own_routes
from oaiserve.plugins.gateway.several.capacity import ModelsCapacity
from oaiserve.plugins.gateway.several.folder import ModelsFolder
from oaiserve.plugins.gateway.several.front import Front
from oaiserve.plugins.gateway.several.loaded import LoadedModel, load
from oaiserve.plugins.gateway.several.metrics import ModelMetrics
from oaiserve.plugins.gateway.several.models import Model, Models
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes import debug
from oaiserve.routes.door.backend import Backend
from oaiserve.run import app_without_engine
from oaiserve.runtime import THREADS, Runtime
from oaiserve.standstill import watch_for_standstills
from oaiserve.storage.private import cache_folder

log = logging.getLogger(__name__)

Load = Callable[[Config, Starlette, Runtime], Awaitable[LoadedModel]]


def create_front(
    config: Config,
    configs: Mapping[str, Config],
    plugins: Sequence[Plugin] | None = None,
    runtime: Runtime = THREADS,
    load_model: Load = load,
) -> tuple[Starlette, Front, FrontMetrics]:
    """Return the app of a server of several models, with these settings by name, its front, whose `drain` must be
    called at a shutdown, and its metrics.

    `config` has the settings of the server as a whole. Without `plugins`, it has those of oaiserve. Raises StartupError
    for files of keys.
    """
    options = config.of(ModelsOptions)
    parts = own_plugins() if plugins is None else plugins
    in_front = [plugin for plugin in parts if plugin.inner.is_in_front]
    ring = keyring(parts, config)
    folder = ModelsFolder()  # It is removed even if the server does not start.
    store = config.of(StoreOptions)
    if store.stores_responses and store.response_store is None:
        store = replace(store, response_store=folder.path / "responses")  # All models share it.
    config = config.having(store)
    models = Models(
        [Model(name, each.having(store), _size(each), _task(each)) for name, each in configs.items()],
        options,
        lambda each: load_model(each, app, runtime),
        runtime.clock_ns,
    )
    metrics = FrontMetrics()
    metrics.registry.register(ModelMetrics(models.by_name.values()))
    behind = [plugin for plugin in parts if not plugin.inner.is_in_front]
    front = Front(models, config, app_without_engine(config, behind), runtime)
    pages = pages_of(parts).shown(None if config.shows_dashboard else debug.closed_route)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.files = None  # A plug-in may store some.
        capacity = ModelsCapacity(front)
        app.state.backend = Backend(config, front, capacity, front.bodies, ring, front.has_others, runtime)
        async with AsyncExitStack() as ends:  # Closes all in reverse order, even if some fail.
            ends.push_async_callback(front.stop)
            if ring is not None:
                ends.push_async_callback(ring.close)
            ends.callback(folder.remove)
            ends.push_async_callback(models.close)
            await ends.enter_async_context(running(in_front, app))
            work = [models.watch(), watch_for_standstills(log, "front", runtime.clock_ns, process_time_ns)]
            if not options.load_on_demand:
                work.append(models.load_all())
            if ring is not None:
                work.append(ring.stay_fresh(runtime))
            async with running_tasks(*work):
                yield

    def is_sampled(trace: TraceContext) -> bool:
        """Return whether spans of this trace will be exported, which is the same for all models."""
        return any(loaded.serving.telemetry.is_sampled(trace) for loaded in [*models.loaded_by_name.values()][:1])

    routes: list[BaseRoute] = [
        Route("/health", health),
        Route("/version", version),
        *own_routes.routes(config, front, metrics, ring, runtime.unix_ns() // 10**9),
        *own_pages.routes(config, front, pages, runtime),
    ]
    routes += routes_of(in_front, config, {getattr(route, "path", "") for route in routes})
    routes += routes_of(behind, config, {getattr(route, "path", "") for route in routes}, ask=front.ask)
    app = front_app(
        config,
        [*routes, Mount("", front)],
        lifespan,
        pages=pages,
        bodies=front.bodies,
        keys=ring,
        count_refused=metrics.count_refused,
        count_refusal_delay=metrics.count_refusal_delay,
        is_sampled=is_sampled,
        runtime=runtime,
    )
    return app, front, metrics


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
