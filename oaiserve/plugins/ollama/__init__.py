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

    from oaiserve.config import Config

# The methods and the paths below /api, with the names of their functions in `api`.
_ROUTES = (
    *(("POST", name, name) for name in ("chat", "generate", "embed", "embeddings", "show", "pull")),
    *(("GET", name, name) for name in ("tags", "ps", "version")),
    *(("POST", name, "refuse") for name in ("push", "create", "copy")),
    ("DELETE", "delete", "refuse"),
)


def _front_routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    from oaiserve.plugins.shared.late import LateEndpoint

    return [
        Route(f"/api/{path}", LateEndpoint("oaiserve.plugins.ollama.api", name), methods=[method])
        for method, path, name in _ROUTES
    ]


plugin = Plugin(name="ollama", inner=InnerParts(front_routes=_front_routes))
