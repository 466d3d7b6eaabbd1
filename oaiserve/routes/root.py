"""/: the name of the server and its links, or a page for browsers, if a plug-in brings pages."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.config import Config
from oaiserve.routes.answer.document import prefers_html
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.operation import Operation
from oaiserve.routes.pages import Pages
from oaiserve.routes.serving import any_serving_of


class Root(msgspec.Struct):
    """The name and version of this server, and relative links, because a proxy may serve it under a prefix. A server
    that shows no requests has no `page` link."""

    name: str
    links: dict[str, str]
    needs_key: bool
    version: str | UnsetType = UNSET  # With --guard-all, only clients with a key see it.


@Operation(summary="Links, or the chat page for browsers.", group="Server", answer=Root, alternatives=("text/html",))
async def root(request: Request) -> Response:
    serving = any_serving_of(request)
    has_chat = serving.task == "generate"
    return await answer_root(
        request, serving.config, serving.version, request.app.state.pages, has_chat=has_chat, has_schema=True
    )


async def answer_root(
    request: Request,
    config: Config,
    version: str,
    pages: Pages,
    *,
    has_chat: bool = True,
    has_schema: bool = False,
) -> Response:
    """Answer a browser with the chat page, or redirect it to another page. Other clients get the `Root`, and so do all
    without pages."""
    if prefers_html(request.headers.get("accept", "")):
        if has_chat and pages.chat is not None:
            return await pages.chat(request)
        if not has_chat and pages.links:
            to = pages.links.get("docs") or next(iter(pages.links.values()))
            return Response(status_code=307, headers={"location": to, "vary": "accept", "cache-control": "no-store"})
    links = {"api": "v1", "models": "v1/models", "health": "health", "metrics": "metrics"}
    links |= {"schema": "openapi.json"} if has_schema else {}
    links |= pages.links
    document = Root("oaiserve", links, config.needs_key, UNSET if config.server.guard_all else version)
    return json_response(document, headers={"vary": "accept", "cache-control": "no-store"})
