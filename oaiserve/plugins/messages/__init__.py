"""/v1/messages, the API of Anthropic, and the count of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oaiserve.errors import ANTHROPIC_PATH
from oaiserve.plugin import Plugin

if TYPE_CHECKING:
    from starlette.routing import Route

    from oaiserve.config import Config


def _routes(config: Config) -> list[Route]:
    from starlette.routing import Route

    from oaiserve.plugins.messages.routes import count_tokens, messages
    from oaiserve.routes.door.accounting import accounted

    return [
        accounted(ANTHROPIC_PATH, messages, "messages"),
        Route(f"{ANTHROPIC_PATH}/count_tokens", count_tokens, methods=["POST"]),
    ]


plugin = Plugin(name="messages", routes=_routes)
