"""The tools of a request to /v1/responses: as in chat, but the fields of a function are beside its type."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from oaiserve.routes.bodies import ResponsesBody
from oaiserve.routes.invalid import invalid, show
from oaiserve.routes.objects import ResponseAllowedChoice, ResponseNamedChoice, ResponseToolChoice
from oaiserve.routes.tools import Kind, Tools, chosen_schemas, schemas_of, shown_tools


def response_tools(body: ResponsesBody) -> Tools | None:
    """Return the tools for the model, or None without any or with the `tool_choice` "none"."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", f"is only allowed with 'tools', got {show(msgspec.to_builtins(choice))}")
        return None
    shown = shown_tools("tools", body.tools, "tools[{}]")
    if choice == "none":
        return None
    kind, names = _choice(choice)
    only_one = kind == "named" or body.parallel_tool_calls is False
    schemas = chosen_schemas("tool_choice", names, schemas_of(shown))
    return Tools(shown, schemas, kind, only_one=only_one, is_legacy=False)


def _choice(choice: ResponseToolChoice | None) -> tuple[Kind, Iterable[str] | None]:
    """Return the kind of a choice, and the names of the remaining tools; None: all."""
    match choice:
        case ResponseNamedChoice(name):
            return "named", [name]
        case ResponseAllowedChoice(mode, tools):
            return mode, [tool.name for tool in tools]
    return ("required" if choice == "required" else "auto"), None
