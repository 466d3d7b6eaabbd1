"""What fronts without a model of their own have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from oaiserve import __version__
from oaiserve.config import Config
from oaiserve.facts.trace import TraceContext
from oaiserve.http.keys import Keyring
from oaiserve.routes.door.access import CountRefusal
from oaiserve.routes.door.layers import middleware
from oaiserve.routes.door.middleware import json_response, render_http_exception
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.pages import Pages
from oaiserve.runtime import Runtime


def front_app(
    config: Config,
    routes: Sequence[BaseRoute],
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    *,
    count_refused: CountRefusal,
    count_refusal_delay: Callable[[int], None] = lambda delay_ns: None,
    pages: Pages,
    bodies: Bodies,
    keys: Keyring | None,
    is_sampled: Callable[[TraceContext], bool] | None,
    runtime: Runtime,
) -> Starlette:
    """Return the app of a front, with the checks of requests before its routes.

    `count_refusal_delay` must not block. It is for fronts without accounts of requests, which have these delays.
    """
    app = Starlette(
        routes=routes,
        # Without `is_sampled`, the servers behind this front put the time they took, and the trace, into headers.
        middleware=middleware(config.server, keys, pages, count_refused, is_sampled, runtime),
        exception_handlers={HTTPException: render_http_exception},
        lifespan=lifespan,
    )
    app.state.pages = pages
    app.state.runtime = runtime
    app.state.bodies = bodies
    app.state.count_refusal_delay = count_refusal_delay
    return app


@asynccontextmanager
async def running_tasks(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run each piece of work in a task, which is cancelled at the end of the block. Raises the error of one that has
    failed."""
    tasks = [*map(asyncio.create_task, work)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def health(request: Request) -> Response:
    return Response()


async def version(request: Request) -> Response:
    return json_response({"version": __version__})
