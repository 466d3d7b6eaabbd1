"""The inspector: with --inspect N, it stores the prompts and answers of the last N requests as tokens, in memory. If an
OpenTelemetry variable enables it, it also adds the texts of requests to their spans."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugins.inspector.options import InspectorOptions

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.engine.event_streams import LoopStreams
    from oaiserve.routes.pages import Pages


def _routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    from oaiserve.plugins.inspector.routes import tokens

    return [Route("/debug/requests/{request_id}/tokens", tokens)]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    from oaiserve.plugins.inspector.routes import first_words

    app.state.first_words = first_words
    yield


def _pages() -> Pages:
    from oaiserve.routes.pages import Pages

    return Pages(parts=[("request.html", "inspector.html")], folders=[Path(__file__).with_name("static")])


def _captures_texts() -> bool:
    from oaiserve.plugins.inspector.span_texts import captures

    return captures(os.environ)


def _check(config: Config) -> None:
    _captures_texts()


def _streams(config: Config) -> Callable[..., LoopStreams] | None:
    number = config.of(InspectorOptions).inspect
    captures = _captures_texts()
    if number == 0 and not captures:
        return None
    from oaiserve.plugins.inspector.kept import KeptRequests
    from oaiserve.plugins.inspector.streams import InspectedStreams

    return partial(InspectedStreams, kept=KeptRequests(number) if number else None, captures=captures)


plugin = Plugin(
    name="inspector",
    options={"Inspector": InspectorOptions},
    check=_check,
    routes=_routes,
    lifespan=_lifespan,
    inner=InnerParts(pages=_pages, streams=_streams),
)
