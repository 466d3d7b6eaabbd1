"""`create_app` builds the server: telemetry, routes and middleware, each with the components that it needs.

No component is in a module's global variables, so that a process can build several servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route

from oaiserve import __version__
from oaiserve.checkpoints import demo
from oaiserve.checkpoints.kind import kind_of
from oaiserve.checkpoints.source import find_mmproj, find_model
from oaiserve.config import Config
from oaiserve.engine.event_streams import MAX_HELD_TOKENS, LoopStreams
from oaiserve.engine.executors.native.prebuilt import usable_features
from oaiserve.engine.gpu_names import gpu_names
from oaiserve.engine.text.response_template import read_response_template
from oaiserve.explain.reuse.recent_prompts import RecentPrompts
from oaiserve.facts.metric import Metric
from oaiserve.facts.times import EpochOffset
from oaiserve.http.connections import Connections
from oaiserve.http.keys import Keyring
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import dialects_of, keyring, own_plugins, pages_of, routes_of, running, streams_of
from oaiserve.routes import chat_completions as chat
from oaiserve.routes import completions, debug, health, models, root, tokens
from oaiserve.routes.dialects.dialect import dialect_of
from oaiserve.routes.door.access import OpenPaths
from oaiserve.routes.door.accounting import accounted
from oaiserve.routes.door.backend import Backend
from oaiserve.routes.door.layers import middleware
from oaiserve.routes.door.middleware import render_http_exception
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.intake.sampling_defaults import sampling_defaults
from oaiserve.routes.openapi import published
from oaiserve.routes.pages import Pages
from oaiserve.routes.sampling_defaults import SamplingDefaults
from oaiserve.routes.serving import MOST_RECEIVED_BYTES, Serving
from oaiserve.runtime import THREADS, Runtime
from oaiserve.telemetry import Measured, Telemetry, names
from oaiserve.telemetry.log_limit import LogLimit
from oaiserve.telemetry.metrics import Numbers
from oaiserve.telemetry.recording import Recording
from oaiserve.telemetry.targets import Targets

if TYPE_CHECKING:
    from oaiserve.engine.boundary import AnyEngine
    from oaiserve.http.fetch import Fetcher

App: TypeAlias = Starlette  # for annotations of modules that import no HTTP server
LAG_INTERVAL_SECONDS = 0.1
TELEMETRY_CLOSE_SECONDS = 5.0  # the longest wait at shutdown for a collector that does not answer


def create_app(
    config: Config,
    engine: AnyEngine,
    telemetry: Telemetry,
    *,
    plugins: Sequence[Plugin] | None = None,
    front: Starlette | None = None,
    has_others_elsewhere: Callable[[str], bool] = lambda client: False,
    runtime: Runtime = THREADS,
) -> Starlette:
    """Return the application, which starts and stops the engine, and closes telemetry.

    Without `plugins`, it has those of oaiserve. If this app serves one of several models, the app `front` calls its
    routes, and provides the middleware, the keys and the files. `has_others_elsewhere` returns whether a client other
    than the given one has open requests in other processes. Raises StartupError for unusable files of keys.
    """
    parts = own_plugins() if plugins is None else plugins
    ring: Keyring | None = keyring(parts, config) if front is None else front.state.backend.keys
    owned = ring if front is None else None
    pages = pages_of(parts).shown(None if config.shows_dashboard else debug.closed_route)
    streams = streams_of(parts, config) or LoopStreams

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sampling = sampling_defaults(config, engine.default_params, engine.recommendation)
        template = config.server.response_template
        app.state.serving = Serving(
            config=config,
            engine=engine,
            streams=streams(engine, asyncio.get_running_loop(), runtime.clock_ns, max_held_tokens=MAX_HELD_TOKENS),
            telemetry=telemetry,
            model_root=demo.HUB_ID if config.model == "demo" else config.model,
            version=__version__,
            kind="" if any(plugin.sampling_rules for plugin in parts) else _kind(config, sampling),
            created=runtime.unix_ns() // 10**9,
            received_bytes=SharedLimit(MOST_RECEIVED_BYTES),
            fetcher=_fetcher(config.server.allow_media_from),
            dialect=dialect_of(
                config.server.tool_call_parser,
                config.server.reasoning_parser,
                engine.tokenizer.chat_template,
                engine.tokenizer.special_token_ids,
                partial(dialects_of, parts),
                None if template is None else read_response_template(template),
            ),
            sampling=sampling,
            recent_prompts=RecentPrompts(config.engine.block_size, has_cache=config.engine.prefix_cache),
            runtime=runtime,
            adapter_loads=runtime.executor("adapters") if config.engine.lora_dir else None,
        )
        serving = app.state.serving
        app.state.files = None if front is None else front.state.files  # A plug-in may store files.
        app.state.bodies = Bodies(int(serving.body_limit), serving.received_bytes, engine.run_in_turns)
        app.state.backend = Backend(
            config,
            app.router,
            engine,
            app.state.bodies,
            ring,
            lambda client: serving.has_others(client) or has_others_elsewhere(client),
            runtime,
        )
        thread = runtime.executor("end")
        in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
        async with AsyncExitStack() as ends:  # Closes all in reverse order, even if some fail.
            ends.callback(thread.shutdown, wait=False)
            if serving.adapter_loads is not None:
                ends.callback(serving.adapter_loads.shutdown, wait=False)
            # All records exist only after the engine's last events, which come before its `stop` returns.
            ends.push_async_callback(in_thread, telemetry.close, TELEMETRY_CLOSE_SECONDS)
            if owned is not None:
                ends.push_async_callback(owned.close)
            engine.start()
            # `Server.shutdown` has already waited for running requests and cut off the rest.
            ends.push_async_callback(in_thread, engine.stop, 0.0)
            tasks = [asyncio.create_task(observe_event_loop_lag(telemetry.observe_event_loop_lag, runtime))]
            if owned is not None:
                tasks.append(asyncio.create_task(owned.stay_fresh(runtime)))
            for task in tasks:
                ends.callback(task.cancel)
            await ends.enter_async_context(running(parts, app))
            yield

    app = Starlette(
        routes=routes(config, parts, pages),
        middleware=middleware(
            config.server,
            ring,
            pages,
            telemetry.count_refused_access,
            telemetry.is_sampled,
            runtime,
        ),
        exception_handlers={HTTPException: render_http_exception},
        lifespan=lifespan,
    )
    app.state.pages = pages
    app.state.runtime = runtime
    app.state.count_refusal_delay = lambda delay_ns: None  # does nothing: telemetry reads the delay from the accounts
    return app


def _fetcher(allowed: tuple[str, ...]) -> Fetcher | None:
    if not allowed:
        return None
    from oaiserve.http.fetch import Fetcher  # Imports an HTTP client, which few servers need.

    return Fetcher(allowed)


def _kind(config: Config, sampling: SamplingDefaults) -> str:
    """Return the kind of this server, which gateways compare; "" if it may answer the same request with different
    bytes."""
    engine = config.engine
    if engine.device == "cuda" or (engine.device == "auto" and Path("/dev/nvidiactl").exists()):
        if not engine.exact:
            return ""
        device = gpu_names()
    else:
        device = sorted(usable_features())
    settings = (engine.dtype, engine.quantize, engine.kv_cache_dtype, engine.compile, engine.max_model_len)
    defaults = sorted(sampling.of_request().items())
    # Only a GGUF model has a separate file that reads images.
    mmproj = find_mmproj(find_model(config.model), engine.mmproj) if config.model.endswith(".gguf") else None
    return kind_of(config.model, (__version__, config.model_name, *settings, device, defaults), mmproj)


def server_telemetry(
    config: Config,
    engine: AnyEngine,
    connections: Connections | None,
    log_limit: LogLimit | None = None,
    plugins: Iterable[Plugin] = (),
    *,
    runtime: Runtime,
) -> Telemetry:
    """Return the telemetry of a server with these components, or without `connections` if another server has them.
    Raises StartupError for wrong OTEL_* variables."""
    elsewhere: dict[Metric, Callable[[], Numbers]] = {
        names.ENGINE_FEATURE: lambda: {(name,): int(not reason) for name, reason in engine.features.items()},
        names.ENGINE_RESTARTS: lambda: {(): engine.num_restarts},
        names.REPLICA_UP: lambda: {(each.name,): int(each.is_up) for each in engine.replicas},
        names.REPLICA_RESTARTS: lambda: {(each.name,): each.num_restarts for each in engine.replicas},
        names.REPLICA_KV_USED_RATIO: lambda: {(each.name,): each.numbers.kv_usage for each in engine.replicas},
        names.REPLICA_SEQUENCES: lambda: {
            (each.name, state): number
            for each in engine.replicas
            for state, number in (("running", each.numbers.num_running), ("waiting", each.numbers.num_waiting))
        },
        names.REPLICA_CHOICES: lambda: {
            (each.name, reason): number for each in engine.replicas for reason, number in each.choices.items()
        },
        names.METER_JOULES: lambda: {(): engine.energy.joules} if engine.energy.is_known else {},
    }
    if connections is not None:
        elsewhere[names.REFUSAL_DELAY_SECONDS] = lambda: {(): connections.refusals.delay_ns / 1e9}
        elsewhere[names.CONNECTIONS] = lambda: {(): connections.num_open}
        elsewhere[names.CONNECTIONS_REFUSED] = lambda: {(why,): n for why, n in connections.refused.items()}
    return Telemetry(
        Measured(
            model=config.model_name,
            version=__version__,
            snapshot=engine.snapshot,
            take_steps=engine.take_steps,
            open_requests=engine.open_requests,
            read_meters=engine.energy.read,
            model_info=engine.model_info,
            elsewhere=elsewhere,
            targets=Targets.parse(config.telemetry.slo or ""),
        ),
        recent_requests=config.telemetry.recent_requests,
        log_limit=log_limit,
        recording=None if config.telemetry.record_requests is None else partial(_recording, config, engine),
        observers={plugin.name: plugin.observe for plugin in plugins if plugin.observe is not None},
        runtime=runtime,
    )


def _recording(config: Config, engine: AnyEngine, epoch_offset_ns: EpochOffset) -> Recording:
    path = config.telemetry.record_requests
    options = config.engine
    assert path is not None
    return Recording(
        path,
        server={
            "model": config.model_name,
            **engine.capacity,
            "policy": options.policy,
            "prefix_cache": options.prefix_cache,
            "itl_target_seconds": options.itl_target_seconds,
        },
        step_cost=lambda: None if (cost := engine.step_cost) is None else asdict(cost),
        epoch_offset_ns=epoch_offset_ns,
    )


async def observe_event_loop_lag(observe: Callable[[float], None], runtime: Runtime) -> None:
    """Measure how late the event loop wakes a sleeping task, until cancelled. Every stream is delayed by as much."""
    while True:
        before_ns = runtime.clock_ns()
        await asyncio.sleep(LAG_INTERVAL_SECONDS)
        observe(max(0.0, (runtime.clock_ns() - before_ns) / 1e9 - LAG_INTERVAL_SECONDS))


def routes(config: Config, plugins: Iterable[Plugin] | None = None, pages: Pages | None = None) -> list[BaseRoute]:
    """Return the routes of a server, including those and the pages of these plug-ins, by default oaiserve's own."""
    parts = own_plugins() if plugins is None else plugins
    shows_requests = config.shows_dashboard
    if pages is None:
        pages = pages_of(parts).shown(None if shows_requests else debug.closed_route)
    if config.engine.lora_dir is None:
        adapters_closed = models.switched_off
    else:
        adapters_closed = models.closed_route
    adapters_open = config.engine.lora_dir is not None and config.is_private
    # /debug and some pages show everyone's requests. They require an API key, a server that only this machine can
    # reach, or a setting with which the operator opens them.
    protected_routes = [*debug.routes(), Route("/debug/report", debug.report)]
    closed_routes = [Route(path, debug.closed_route) for path in ("/debug/requests", "/debug/clients", "/debug/report")]
    table: list[BaseRoute] = [
        accounted("/v1/completions", completions.completions, "text_completion"),
        accounted("/v1/chat/completions", chat.chat_completions, "chat"),
        *(
            Route(f"/v1/{name}_lora_adapter", route if adapters_open else adapters_closed, methods=["POST"])
            for name, route in (("load", models.load), ("unload", models.unload))
        ),
        Route("/v1/models", models.list_models),
        Route("/v1/models/{model_id:path}", models.retrieve_model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.tokenizer_info),
        Route("/", root.root),
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/version", health.version),
        Route("/metrics", health.metrics),
        *pages.routes,
        *(protected_routes if shows_requests else closed_routes),
    ]
    table += routes_of(parts, config, {getattr(route, "path", "") for route in table})
    described = [route for route in table if isinstance(route, Route)]
    is_open = OpenPaths(pages, guard_all=config.server.guard_all)
    schema = published(described, version=__version__, needs_key=config.needs_key, is_open=is_open)
    table.append(Route("/openapi.json", schema))
    return table
