"""The tools of a request to /v1/responses: as in chat, but the fields of a function are beside its type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from oaiserve.errors import InvalidRequest
from oaiserve.routes.protocol import ResponsesBody, invalid, show
from oaiserve.routes.tools import Tools, chosen_name, shown_tools


def response_tools(body: ResponsesBody) -> Tools | None:
    """Return the tools that the model may call; None if there are none, or if `tool_choice` is "none"."""
    nested = [_nested(f"tools[{i}]", entry) for i, entry in enumerate(body.tools or [])]
    choice = body.tool_choice
    if not nested:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", f"is only allowed with 'tools', got {show(choice)}")
        return None
    shown = shown_tools("tools", nested, is_flat=True)
    if choice == "none":
        return None
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in shown}
    kind, names = _choice(choice, schemas)
    only_one = kind == "named" or body.parallel_tool_calls is False
    return Tools(shown, {name: schemas[name] for name in names}, kind, only_one=only_one, is_legacy=False)


def _nested(where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `tools` in the form of chat."""
    kind = entry.get("type")
    if kind != "function":
        reason = f"must be 'function', because this server runs no tools of its own, got {show(kind)}"
        raise InvalidRequest(f"Invalid '{where}.type': {reason}.", param="tools")
    if "function" in entry and "name" not in entry:
        reason = "is the form of chat completions: here, its fields are those of the entry itself"
        raise InvalidRequest(f"Invalid '{where}.function': {reason}.", param="tools")
    return {"type": kind, "function": {key: value for key, value in entry.items() if key != "type"}}


def _choice(
    choice: str | Mapping[str, Any] | None, names: Iterable[str]
) -> tuple[Literal["auto", "required", "named"], Iterable[str]]:
    """Return the kind of a choice, and the names of the tools that it leaves."""
    param = "tool_choice"
    if choice is None or choice == "auto":
        return "auto", names
    if choice == "required":
        return "required", names
    if isinstance(choice, str):
        raise invalid(param, f"must be 'none', 'auto' or 'required', or an object, got {show(choice)}")
    if (kind := choice.get("type")) == "function":
        return "named", [chosen_name(param, choice, names)]
    if kind != "allowed_tools":
        raise _invalid_choice("type", f"must be 'function' or 'allowed_tools', got {show(kind)}")
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise _invalid_choice("mode", f"must be 'auto' or 'required', got {show(mode)}")
    if not isinstance(tools, list) or not tools:
        raise _invalid_choice("tools", f"must be a list that is not empty, got {show(tools)}")
    return mode, dict.fromkeys(chosen_name(param, tool, names) for tool in tools)


def _invalid_choice(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid 'tool_choice.{name}': {reason}.", param="tool_choice")
