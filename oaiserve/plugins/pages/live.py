"""The feed of a server's live page. It has no text of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import Overloaded
from oaiserve.plugins.shared.feed import LAST_SAMPLES, Feed, feed_response
from oaiserve.routes.answer import sse
from oaiserve.routes.open_requests import open_requests
from oaiserve.routes.operation import Operation
from oaiserve.routes.serving import AnyServing, any_serving_of

MOST_REQUESTS = 30  # rows of the waterfall


@asynccontextmanager
async def running(app: Starlette) -> AsyncIterator[None]:
    """Keep the feed that all viewers of the live page share."""
    app.state.feed = Feed(lambda: _update(app.state.serving))
    try:
        yield
    finally:
        await app.state.feed.close()


@Operation(
    summary="The feed of the live page: server-sent events, about one a second.",
    group="Pages",
    answer="text/event-stream",
    errors=(Overloaded,),
)
async def feed(request: Request) -> Response:
    """Stream the event `hello` once, with the last minutes, and then `update` about once a second. Raises
    Overloaded."""
    shared: Feed = request.app.state.feed
    return feed_response(request, shared, _events(any_serving_of(request), shared))


async def _events(serving: AnyServing, shared: Feed) -> AsyncIterator[bytes]:
    yield await run_in_threadpool(_hello, serving)
    while serving.engine.is_ready:  # a server that shuts down does not wait for viewers
        yield await shared.next()


def _hello(serving: AnyServing) -> bytes:
    data = {
        "model": serving.config.model_name,
        "version": serving.version,
        "boundaries_seconds": serving.telemetry.samples.boundaries_seconds,
        **_state(serving, serving.telemetry.samples.after(0)),
    }
    return sse.event(msgspec.json.encode(data), "hello")


def _update(serving: AnyServing) -> bytes:
    """Return the message for all viewers. It repeats the last few samples, in case a viewer missed one; viewers ignore
    samples they already have."""
    return sse.event(msgspec.json.encode(_state(serving, serving.telemetry.samples.after(0)[-LAST_SAMPLES:])), "update")


def _state(serving: AnyServing, samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "samples": samples,
        "requests": serving.telemetry.recent.list(limit=MOST_REQUESTS, rows=True),
        "open": open_requests(serving),
        "costs": serving.telemetry.samples.costs(),
    }
