"""The tools that a chat request brings, and which of them the model may or must call.

`functions` and `function_call`, the older names, are translated. `response_tools.py` does the same for /v1/responses,
whose entries have the function's fields beside the type. Every refusal is an `InvalidRequest` that names the parameter.
This file knows nothing of prompts and answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oaiserve.errors import InvalidRequest
from oaiserve.routes.protocol import MAX_TOOLS, ChatBody, invalid, show

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# With one of these, a schema says itself which properties there are beside those in `properties`.
_KEYS_OF_PROPERTIES = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf", "if", "minProperties"),
}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. `choice` is what its `tool_choice` says; "named" forces a call of one certain tool."""

    shown: Sequence[Mapping[str, Any]]  # to the model, in the form of the API
    schemas: Mapping[str, Mapping[str, Any]]  # of the arguments of those that may be called, by name
    choice: Literal["auto", "required", "named"]
    only_one: bool  # at most one call
    is_legacy: bool  # the request has `functions`

    @property
    def is_forced(self) -> bool:
        return self.choice != "auto"


def requested_tools(body: ChatBody) -> Tools | None:
    """Return the tools that the model may call; None if there are none, or if `tool_choice` is "none"."""
    is_legacy = body.functions is not None or body.function_call is not None
    if is_legacy:
        if body.tools is not None or body.tool_choice is not None:
            raise invalid("functions", "must not be given together with 'tools' or 'tool_choice'")
        param, entries = "functions", [{"type": "function", "function": each} for each in body.functions or []]
        choice_param, choice = "function_call", body.function_call
    else:
        param, entries = "tools", body.tools or []
        choice_param, choice = "tool_choice", body.tool_choice
    if not entries:
        if choice not in (None, "none"):
            raise invalid(choice_param, f"is only allowed with '{param}', got {show(choice)}")
        return None
    shown = shown_tools(param, entries, is_flat=is_legacy)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in shown}
    if choice == "none":
        return None
    kind, names = _choice(choice_param, choice, schemas, is_legacy=is_legacy)
    return Tools(
        shown,
        {name: schemas[name] for name in names},
        kind,
        only_one=is_legacy or kind == "named" or body.parallel_tool_calls is False,
        is_legacy=is_legacy,
    )


def shown_tools(param: str, entries: Sequence[Mapping[str, Any]], *, is_flat: bool = False) -> list[dict[str, Any]]:
    """Return the checked tools as they are shown to the model. If the client's entries were flat, errors name their
    fields without the level of `function`."""
    if len(entries) > MAX_TOOLS:
        raise invalid(param, f"at most {MAX_TOOLS} are allowed, got {len(entries)}")
    shown = [_tool(f"{param}[{i}]", param, entry, is_flat=is_flat) for i, entry in enumerate(entries)]
    names: set[str] = set()
    for tool in shown:
        if (name := tool["function"]["name"]) in names:
            raise invalid(param, f"two have the name {show(name)}")
        names.add(name)
    return shown


def _tool(where: str, param: str, entry: Mapping[str, Any], *, is_flat: bool) -> dict[str, Any]:
    """Return an entry of `tools` as it is shown to the model, with parameters in any case."""
    where_function = where if is_flat else f"{where}.function"
    if (kind := entry.get("type")) != "function":
        raise _invalid(param, f"{where}.type", f"must be 'function', got {show(kind)}")
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise _invalid(param, where_function, f"must be an object, got {show(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        reason = f"must have 1 to 64 letters, digits, '_' or '-', got {show(name)}"
        raise _invalid(param, f"{where_function}.name", reason)
    given = {key: value for key, value in function.items() if value is not None}
    _check_types(param, where_function, given, description=str, strict=bool, parameters=dict)
    parameters = given.get("parameters") or {"properties": {}}
    where_parameters = f"{where_function}.parameters"
    _check_types(param, where_parameters, parameters, properties=dict, required=list)
    if (kind := parameters.get("type", "object")) != "object":
        raise _invalid(param, f"{where_parameters}.type", f"must be 'object', got {show(kind)}")
    return {"type": "function", "function": {**given, "parameters": {"type": "object", **parameters}}}


_TYPES = {str: "a string", bool: "true or false", dict: "an object", list: "a list"}


def _check_types(param: str, where: str, value: Mapping[str, Any], **types: type) -> None:
    for key, wanted in types.items():
        if key in value and not isinstance(value[key], wanted):
            raise _invalid(param, f"{where}.{key}", f"must be {_TYPES[wanted]}, got {show(value[key])}")


def _choice(
    param: str, choice: str | Mapping[str, Any] | None, names: Iterable[str], *, is_legacy: bool
) -> tuple[Literal["auto", "required", "named"], Iterable[str]]:
    """Return the kind of a choice, and the names of the tools that it leaves."""
    if choice is None or choice == "auto":
        return "auto", names
    if choice == "required" and not is_legacy:
        return "required", names
    if isinstance(choice, str):
        words = "'none' or 'auto'" if is_legacy else "'none', 'auto' or 'required'"
        raise invalid(param, f"must be {words}, or an object, got {show(choice)}")
    if is_legacy:
        return "named", [chosen_name(param, choice, names)]
    if (kind := choice.get("type")) == "function":
        return "named", [chosen_name(param, choice.get("function"), names)]
    if kind != "allowed_tools":
        raise _invalid(param, f"{param}.type", f"must be 'function' or 'allowed_tools', got {show(kind)}")
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise _invalid(param, f"{param}.allowed_tools", f"must be an object, got {show(allowed)}")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise _invalid(param, f"{param}.allowed_tools.mode", f"must be 'auto' or 'required', got {show(mode)}")
    if not isinstance(tools, list) or not tools:
        raise _invalid(param, f"{param}.allowed_tools.tools", f"must be a list that is not empty, got {show(tools)}")
    chosen = [chosen_name(param, tool.get("function") if isinstance(tool, Mapping) else None, names) for tool in tools]
    return mode, dict.fromkeys(chosen)


def chosen_name(param: str, function: object, names: Iterable[str]) -> str:
    """Return the name of the function that an object of a choice has. Raises InvalidRequest if no tool has it."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid(param, "an object must name a function: it has no function with a name")
    if name not in names:
        raise invalid(param, f"there is no tool with the name {show(name)}")
    return name


def _invalid(param: str, where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{where}': {reason}.", param=param)


def forced_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that forced arguments follow: `schema`, but without properties that it does not name.

    JSON Schema allows any others unless it is told not to, and a model that is forced would invent some for ever.
    """
    return schema if schema.keys() & _KEYS_OF_PROPERTIES else {**schema, "additionalProperties": False}
