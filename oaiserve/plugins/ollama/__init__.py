"""Ollama's API: /api/chat, /api/generate, /api/embed and routes about models, answered by those of OpenAI's API.

A gateway has these routes, too: each request becomes one to `/v1/...` of the same app. So whatever holds for OpenAI's
routes holds here: keys, limits, turns, accounts, continued streams and several models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts

if TYPE_CHECKING:
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

    from oaiserve.config import Config
    from oaiserve.routes.operation import Operation

# The methods and the paths below /api, with the names of their functions in `api`.
_ROUTES = (
    *(("POST", name, name) for name in ("chat", "generate", "embed", "embeddings", "show", "pull")),
    *(("GET", name, name) for name in ("tags", "ps", "version")),
    *(("POST", name, "refuse") for name in ("push", "create", "copy")),
    ("DELETE", "delete", "refuse"),
)


class _Late:
    """An endpoint that is imported with its first request, or with the first look at its description: most servers
    get no request of Ollama's clients."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def operation(self) -> Operation | None:
        from oaiserve.plugins.ollama import api
        from oaiserve.routes.operation import operation_of

        return operation_of(getattr(api, self._name))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from oaiserve.plugins.ollama import api

        await getattr(api, self._name)(scope, receive, send)


def _front_routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    return [Route(f"/api/{path}", _Late(name), methods=[method]) for method, path, name in _ROUTES]


plugin = Plugin(name="ollama", inner=InnerParts(front_routes=_front_routes))
