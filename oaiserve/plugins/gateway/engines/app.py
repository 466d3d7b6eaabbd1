"""Builds the gateway in front of foreign engines: its own routes and pages, and the relay for all the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import process_time_ns

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from oaiserve import __version__
from oaiserve.config import TelemetryOptions
from oaiserve.errors import Unavailable
from oaiserve.explain.reuse.recent_prompts import RecentPrompts
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.metric import Metric
from oaiserve.facts.times import EpochOffset
from oaiserve.http.connections import Connections
from oaiserve.http.fair_turns import at_once
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import check, keyring, own_plugins, pages_of, routes_of, running
from oaiserve.plugins.gateway.app import CLOSE_SECONDS
from oaiserve.plugins.gateway.basics import front_app, health, running_tasks
from oaiserve.plugins.gateway.engines.engine import ForeignEngine
from oaiserve.plugins.gateway.engines.fleet import Fleet, log
from oaiserve.plugins.gateway.engines.metrics import ObservedEngines, is_shown, readers
from oaiserve.plugins.gateway.engines.read_again import PIECE_BLOCK
from oaiserve.plugins.gateway.engines.relay import EngineRelay
from oaiserve.plugins.gateway.engines.serving import UNKNOWN_MODEL, EngineServing
from oaiserve.plugins.gateway.options import EnginesOptions, RouteOptions
from oaiserve.plugins.gateway.sources import Resolve, addresses_of
from oaiserve.routes import debug, root
from oaiserve.routes import health as of_server
from oaiserve.routes.door.accounting import accounted
from oaiserve.routes.door.backend import Backend
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.serving import MEDIA_BODY_BYTES, MOST_RECEIVED_BYTES, AnyServing
from oaiserve.runtime import THREADS, Runtime
from oaiserve.standstill import watch_for_standstills
from oaiserve.telemetry import Measured, Telemetry, names
from oaiserve.telemetry.log_limit import LogLimit
from oaiserve.telemetry.metrics import Numbers
from oaiserve.telemetry.recording import Recording
from oaiserve.telemetry.targets import Targets

# The paths of engines whose requests have an account, and the kind of request: of OpenAI's and Anthropic's API, and the
# own paths of llama.cpp, SGLang, vLLM and Ollama
ACCOUNTED = {
    **dict.fromkeys(("/v1/chat/completions", "/chat/completions", "/api/chat"), "chat"),
    **dict.fromkeys(("/v1/completions", "/completions", "/completion", "/infill"), "text_completion"),
    **dict.fromkeys(("/generate", "/api/generate"), "text_completion"),
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
}
CLOSED = ("/debug/{rest:path}", "/dashboard/{rest:path}")  # engines' pages that could show other clients' requests
PLUGINS = ("keys", "pages", "runs")  # the plug-ins that work without an engine of oaiserve


def create_engine_gateway(
    options: RouteOptions,
    engines: EnginesOptions,
    *,
    connections: Connections | None = None,
    log_limit: LogLimit | None = None,
    resolve: Resolve = addresses_of,
    plugins: Sequence[Plugin] | None = None,
    runtime: Runtime = THREADS,
) -> tuple[Starlette, Fleet]:
    """Return the app of a gateway in front of these engines, and the engines, whose `drain` must be called at a
    shutdown. Raises StartupError for unusable files of keys, and wrong OTEL_* variables."""
    # Without a file of its own, the gateway passes batches on, because an engine may have them.
    wanted = PLUGINS if engines.response_store is None else (*PLUGINS, "batches")
    parts = [plugin for plugin in (own_plugins() if plugins is None else plugins) if plugin.name in wanted]
    config = engines.config_of(options, UNKNOWN_MODEL, parts)
    check(parts, config)
    ring = keyring(parts, config)
    # /docs passes to the engine, too: it describes an API that isn't ours.
    pages = pages_of(parts).without("docs").shown(None if config.shows_dashboard else debug.closed_route)
    clock_ns = runtime.clock_ns
    found = [
        ForeignEngine(url, number, engines.engine_key, resolve) for number, url in enumerate(engines.engine, start=1)
    ]
    fleet = Fleet(found, clock_ns)
    telemetry = _telemetry(fleet, engines.telemetry, connections, log_limit, parts, runtime)
    in_turns = runtime.executor("bodies")
    bodies = Bodies(
        int(options.body_limit or MEDIA_BODY_BYTES),
        SharedLimit(MOST_RECEIVED_BYTES),
        lambda work, *, client, num_bytes: in_turns.submit(at_once, work),
    )
    relay = EngineRelay(
        fleet,
        bodies.received,
        bodies.limit_bytes,
        has_keys=ring is not None,
        is_sampled=telemetry.is_sampled,
        has_tracing=telemetry.has_tracing,
        clock_ns=clock_ns,
        recent_prompts=RecentPrompts(PIECE_BLOCK, has_cache=True),
    )
    serving: AnyServing = EngineServing(config, fleet, telemetry, runtime)

    async def ready(request: Request) -> Response:
        if not fleet.is_ready:
            raise Unavailable("No engine is ready for requests.", retry_after_seconds=5)
        return Response()

    async def links(request: Request) -> Response:
        return await root.answer_root(request, config, __version__, pages)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.serving = serving
        app.state.backend = Backend(config, app.router, fleet, bodies, ring, fleet.has_others, runtime)
        thread = runtime.executor("end")
        async with AsyncExitStack() as ends:  # in reverse order, each even if others fail
            ends.callback(thread.shutdown, wait=False)
            ends.callback(in_turns.shutdown, wait=False)
            in_thread = asyncio.get_running_loop().run_in_executor
            ends.push_async_callback(lambda: in_thread(thread, telemetry.close, CLOSE_SECONDS))
            work = [fleet.run(), watch_for_standstills(log, "gateway", clock_ns, process_time_ns)]
            if ring is not None:
                ends.push_async_callback(ring.close)
                work.append(ring.stay_fresh(runtime))
            await ends.enter_async_context(running_tasks(*work))
            await ends.enter_async_context(running(parts, app))
            yield

    routes: list[BaseRoute] = [
        # A path is looked for in this order, and most requests are to these.
        *(accounted(path, relay.route, operation) for path, operation in ACCOUNTED.items()),
        Route("/", links),
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", of_server.version),
        Route("/metrics", of_server.metrics),
        *pages.routes,
        *(debug.routes() if config.shows_dashboard else [Route(path, debug.closed_route) for path in CLOSED]),
    ]
    routes += routes_of(parts, config, {getattr(route, "path", "") for route in routes})
    app = front_app(
        config,
        [*routes, Mount("", relay)],
        lifespan,
        count_refused=telemetry.count_refused_access,
        pages=pages,
        bodies=bodies,
        keys=ring,
        is_sampled=None,
        runtime=runtime,
    )
    for metric, read in readers(found).items():
        telemetry.show(metric, read)
    return app, fleet


def _telemetry(
    fleet: Fleet,
    options: TelemetryOptions,
    connections: Connections | None,
    log_limit: LogLimit | None,
    plugins: Sequence[Plugin],
    runtime: Runtime,
) -> Telemetry:
    elsewhere: dict[Metric, Callable[[], Numbers]] = {}
    if connections is not None:
        elsewhere[names.REFUSAL_DELAY_SECONDS] = lambda: {(): connections.refusals.delay_ns / 1e9}
        elsewhere[names.CONNECTIONS] = lambda: {(): connections.num_open}
        elsewhere[names.CONNECTIONS_REFUSED] = lambda: {(why,): n for why, n in connections.refused.items()}

    def numbers() -> EngineNumbers:
        samples = [engine.reported.last for engine in fleet.engines]
        waiting = sum(sample.waiting or 0 for sample in samples if sample is not None)
        return EngineNumbers(num_running=sum(engine.num_open for engine in fleet.engines), num_waiting=waiting)

    path = options.record_requests
    return Telemetry(
        Measured(
            model=UNKNOWN_MODEL,
            version=__version__,
            snapshot=numbers,
            elsewhere=elsewhere,
            series=ObservedEngines,
            shows=is_shown,
            targets=Targets.parse(options.slo or ""),
        ),
        recent_requests=options.recent_requests,
        log_limit=log_limit,
        recording=None if path is None else lambda epoch_offset_ns: _recording(path, epoch_offset_ns),
        observers={plugin.name: plugin.observe for plugin in plugins if plugin.observe is not None},
        runtime=runtime,
    )


def _recording(path: Path, epoch_offset_ns: EpochOffset) -> Recording:
    return Recording(path, server={"model": UNKNOWN_MODEL}, step_cost=lambda: None, epoch_offset_ns=epoch_offset_ns)
