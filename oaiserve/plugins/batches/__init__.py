"""/v1/files, /v1/batches and /v1/messages/batches: requests that are answered while nobody else needs the machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from oaiserve.plugin import Command, Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugins.shared.store_options import StoreOptions

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.routes.door.backend import Backend


def _check(config: Config) -> None:
    path = config.of(StoreOptions).response_store
    if path is not None:
        from oaiserve.plugins.batches.store import opened_lock

        os.close(opened_lock(path))


def _routes(config: Config) -> list[Route]:
    from oaiserve.plugins.batches import message_batches, routes

    return [*routes.routes(), *message_batches.routes()]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    from oaiserve.plugins.batches.runner import BatchRunner
    from oaiserve.plugins.batches.store import BatchStore

    backend: Backend = app.state.backend
    options = backend.config.of(StoreOptions)
    app.state.batches = None
    if not options.stores_responses:
        yield
        return
    store = BatchStore(options.response_store, options.limits, backend.runtime)
    app.state.files = store
    app.state.batches = runner = BatchRunner(app, backend, store)
    running = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


plugin = Plugin(
    name="batches",
    commands={"batch": Command("Answer all requests of a file, at low priority.", f"{__name__}.command")},
    options={"Stored responses and files": StoreOptions},
    check=_check,
    routes=_routes,
    lifespan=_lifespan,
    inner=InnerParts(is_in_front=True),
)
