"""The pages for browsers: the chat, the live page with its feed, the last requests, and the API."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.routes.pages import Pages


def _pages() -> Pages:
    from oaiserve.plugins.pages.files import PAGES

    return PAGES


def _routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    from oaiserve.plugins.pages.live import feed

    return [Route("/dashboard/feed", feed)] if config.shows_dashboard else []


def _lifespan(app: Starlette) -> AbstractAsyncContextManager[None]:
    from oaiserve.plugins.pages.live import running

    return running(app)


plugin = Plugin(name="pages", routes=_routes, lifespan=_lifespan, inner=InnerParts(pages=_pages))
