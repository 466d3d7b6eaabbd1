"""Stored API keys with quotas: `oaiserve keys` makes them, --stored-keys accepts them, and /admin/keys lists them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from oaiserve.plugin import Command, Plugin, StartupError
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugins.keys.options import KeysOptions
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.runtime import THREADS, Runtime

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.plugins.keys.key_store import KeyStore
    from oaiserve.routes.door.backend import Backend

logger = logging.getLogger(__name__)


def _file(config: Config) -> Path | None:
    """Return the file with the keys, or None for a server without stored keys."""
    if not config.of(KeysOptions).stored_keys:
        return None
    file = config.of(StoreOptions).response_store
    if file is None:
        raise StartupError("--stored-keys needs --response-store, whose file has the keys.")
    return file


def _check(config: Config) -> None:
    from oaiserve.plugins.keys.key_table import KeyTable, check_share

    check_share("--default-share", config.of(KeysOptions).default_share)
    if (file := _file(config)) is not None:
        KeyTable(file).close()


def _routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    from oaiserve.plugins.keys import routes

    return [Route("/admin/keys", routes.list_keys if config.of(KeysOptions).stored_keys else routes.closed_route)]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    from oaiserve.plugins.keys.key_store import KeyStore

    backend: Backend = app.state.backend
    sources = () if backend.keys is None else backend.keys.sources
    if any(isinstance(source, KeyStore) and not source.valid() for source in sources):
        logger.warning(
            "There are no stored keys yet. To create one: oaiserve keys add NAME --response-store '%s'",
            backend.config.of(StoreOptions).response_store,
        )
    yield


def with_runtime(runtime: Runtime) -> Plugin:
    """Return the plug-in, whose store of keys works in this runtime."""

    def keys(config: Config) -> KeyStore | None:
        from oaiserve.plugins.keys.key_store import KeyStore
        from oaiserve.plugins.keys.key_table import KeyTable

        if (file := _file(config)) is None:
            return None
        share = config.of(KeysOptions).default_share
        return KeyStore(KeyTable(file, lambda: runtime.unix_ns() / 1e9, share), runtime)

    return Plugin(
        name="keys",
        commands={"keys": Command("Create, list, limit and revoke API keys.", f"{__name__}.command")},
        options={"Stored responses and files": StoreOptions, "Stored keys": KeysOptions},
        check=_check,
        keys=keys,
        routes=_routes,
        lifespan=_lifespan,
        inner=InnerParts(is_in_front=True),
    )


plugin = with_runtime(THREADS)
