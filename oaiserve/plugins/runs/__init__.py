"""Runs of agents: the requests that belong together, with the time of tools and users between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oaiserve.facts.times import WallClock
from oaiserve.plugin import Plugin, StartupError
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugins.runs import metrics
from oaiserve.plugins.runs.kept_runs import KeptRuns
from oaiserve.plugins.runs.turns import row_of
from oaiserve.runtime import THREADS, Runtime

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.plugin.parts import AskReplicas
    from oaiserve.routes.pages import Pages

Observe = Callable[[float], None]  # adds a value to a histogram

PATH = "/debug/runs"
EVERY_SECONDS = 15  # interval at which silent runs are counted


def _routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    from oaiserve.plugins.runs.routes import recent_run, recent_runs
    from oaiserve.routes.debug import closed_route

    if not config.shows_dashboard:
        return [Route(PATH, closed_route)]
    return [Route(PATH, recent_runs), Route(f"{PATH}/{{run_id}}", recent_run)]


def _gateway_routes(ask: AskReplicas, config: Config) -> list[Route]:
    from oaiserve.plugins.runs.gateway import routes

    return routes(PATH, ask) if config.shows_dashboard else _routes(config)


def _pages() -> Pages:
    from oaiserve.routes.pages import Pages, View

    return Pages(
        views=[
            View(path="/runs", file="runs.html", summary="The page with the last runs of agents.", link="Runs"),
            View(path="/runs/{run_id}", file="run.html", summary="The page of one run."),
        ],
        folders=[Path(__file__).with_name("static")],
    )


def count_ended(kept: KeptRuns, turns: Observe, tool_seconds: Observe, reused_ratio: Observe) -> None:
    """Add the runs that have ended since the last call to the histograms."""
    for run in kept.take_ended():
        row = row_of("", run, kept.now_unix_ns())
        turns(row.num_turns)
        tool_seconds(row.tools_ns / 1e9)
        reused_ratio(row.cached_tokens / max(1, row.prompt_tokens))


def plugin(settings: Mapping[str, Any], runtime: Runtime = THREADS) -> Plugin:
    """Return the plug-in with the runs of one server, which are as old as the clocks of this runtime say."""
    if settings:
        raise StartupError(f"it takes no settings, but the config file has {', '.join(settings)}.")
    kept = KeptRuns(runtime.unix_ns, WallClock(runtime.unix_ns, runtime.clock_ns))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.runs = kept
        telemetry = app.state.serving.telemetry
        histograms = [telemetry.show_histogram(metric) for metric in metrics.METRICS]

        async def count() -> None:
            while True:
                await asyncio.sleep(EVERY_SECONDS)
                await asyncio.to_thread(count_ended, kept, *histograms)

        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()

    return Plugin(
        name="runs",
        routes=_routes,
        lifespan=lifespan,
        metrics=metrics.METRICS,
        observe=kept.add,
        inner=InnerParts(pages=_pages, gateway_routes=_gateway_routes),
    )
