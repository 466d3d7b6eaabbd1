"""Stored API keys with quotas: `oaiserve keys` makes them, --stored-keys accepts them, and /admin/keys lists them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from oaiserve.plugin import Command, Plugin

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.plugins.keys.key_store import KeyStore
    from oaiserve.routes.door.backend import Backend

logger = logging.getLogger(__name__)


def _check(config: Config) -> None:
    from oaiserve.plugins.keys.key_table import KeyTable

    file = config.server.response_store
    if not config.server.stored_keys or file is None:
        return
    KeyTable(file).close()


def _keys(config: Config) -> KeyStore | None:
    from oaiserve.plugins.keys.key_store import KeyStore
    from oaiserve.plugins.keys.key_table import KeyTable

    if not config.server.stored_keys or config.server.response_store is None:
        return None
    return KeyStore(KeyTable(config.server.response_store))


def _routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    from oaiserve.plugins.keys import routes

    return [Route("/admin/keys", routes.list_keys if config.server.stored_keys else routes.closed_route)]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    from oaiserve.plugins.keys.key_store import KeyStore

    backend: Backend = app.state.backend
    sources = () if backend.keys is None or backend.is_child else backend.keys.sources
    if any(isinstance(source, KeyStore) and not source.valid() for source in sources):
        logger.warning(
            "There are no stored keys yet. To create one: oaiserve keys add NAME --response-store '%s'",
            backend.config.server.response_store,
        )
    yield


plugin = Plugin(
    name="keys",
    commands={"keys": Command("Create, list, limit and revoke API keys.", f"{__name__}.command")},
    check=_check,
    keys=_keys,
    routes=_routes,
    lifespan=_lifespan,
    is_in_front=True,
)
