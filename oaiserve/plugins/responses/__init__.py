"""/v1/responses and /v1/conversations, with their store, compaction, and responses in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugins.responses import metrics
from oaiserve.plugins.shared.store_options import StoreOptions

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.plugins.responses.store import ResponseDatabase
    from oaiserve.runtime import Runtime

PATH = "/v1/responses"


def _check(config: Config) -> None:
    from oaiserve.plugins.responses import store

    if (file := config.of(StoreOptions).response_store) is not None:
        store.check(file)


def _routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    from oaiserve.plugins.responses import compact, conversations, routes, stored
    from oaiserve.routes.door.accounting import accounted

    return [
        accounted(PATH, routes.responses, "responses"),
        Route(f"{PATH}/input_tokens", routes.input_tokens, methods=["POST"]),
        accounted(f"{PATH}/compact", compact.compact, "responses"),
        *(
            Route(f"/v1/{path}", route, methods=[method])
            for path, method, route in (
                ("responses/{response_id}", "GET", stored.retrieve),
                ("responses/{response_id}", "DELETE", stored.delete),
                ("responses/{response_id}/input_items", "GET", stored.list_input_items),
                ("responses/{response_id}/cancel", "POST", stored.cancel),
                ("conversations", "POST", conversations.create),
                ("conversations/{conversation_id}", "GET", conversations.retrieve),
                ("conversations/{conversation_id}", "POST", conversations.update),
                ("conversations/{conversation_id}", "DELETE", conversations.delete),
                ("conversations/{conversation_id}/items", "GET", conversations.list_items),
                ("conversations/{conversation_id}/items", "POST", conversations.add_items),
                ("conversations/{conversation_id}/items/{item_id}", "GET", conversations.retrieve_item),
                ("conversations/{conversation_id}/items/{item_id}", "DELETE", conversations.delete_item),
            )
        ),
    ]


def _front_routes(config: Config) -> list[Route]:
    from oaiserve.plugins.responses.socket import socket_route

    return [socket_route(PATH)]


def _opened(config: Config, runtime: Runtime) -> ResponseDatabase:
    from oaiserve.plugins.responses.store import ResponseDatabase

    options = config.of(StoreOptions)
    return ResponseDatabase(options.response_store, options.limits, runtime)


def with_store(open_store: Callable[[Config, Runtime], ResponseDatabase]) -> Plugin:
    """Return the plug-in with the store that `open_store` opens when the server starts."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        from oaiserve.plugins.responses.background_store import BackgroundStore
        from oaiserve.plugins.responses.resumption import Resumption
        from oaiserve.plugins.responses.runs import Runs
        from oaiserve.plugins.responses.state import State

        serving = app.state.serving
        options = serving.config.of(StoreOptions)
        store = open_store(serving.config, serving.runtime)
        background = BackgroundStore(options.response_store, options.limits, serving.runtime)
        app.state.responses = State(store, background, Runs(options.limits))
        show = serving.telemetry.show
        show(metrics.STORED, lambda: {(): store.recounted().number})
        show(metrics.STORED_BYTES, lambda: {(): store.recounted().num_bytes})
        show(metrics.DROPPED, lambda: {(why,): number for why, number in store.counts().dropped.items()})
        resuming = None
        if background.is_shared:
            resuming = asyncio.create_task(Resumption(app, app.state.responses).run())
        try:
            yield
        finally:
            if resuming is not None:
                resuming.cancel()
                await asyncio.gather(resuming, return_exceptions=True)
            await background.close()
            await store.close()

    return Plugin(
        name="responses",
        options={"Stored responses and files": StoreOptions},
        check=_check,
        routes=_routes,
        lifespan=lifespan,
        metrics=(metrics.STORED, metrics.STORED_BYTES, metrics.DROPPED),
        inner=InnerParts(front_routes=_front_routes),
    )


plugin = with_store(_opened)
