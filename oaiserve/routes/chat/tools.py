"""The tools of a request, and the choice of those that the model may or must call.

The entries of /v1/responses, which have the function's fields next to the type, are translated. Each refusal is an
`InvalidRequest` that names the parameter.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec

from oaiserve.engine.request import Grammar
from oaiserve.routes.adaptations import Note
from oaiserve.routes.chat.constraints import note_not_obeyed
from oaiserve.routes.chat.shown_tools import ShownTools, shown_tools
from oaiserve.routes.intake.body_types import ChatBody
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import (
    AllowedChoice,
    Function,
    FunctionName,
    NamedChoice,
    ResponseChoice,
    ResponseToolChoice,
    Tool,
    ToolChoice,
)

Kind = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. `choice` is its `tool_choice`; "named" forces a call of a certain tool."""

    shown: Sequence[Mapping[str, Any]]  # tools that the model sees, in the form of the API
    schemas: Mapping[str, Mapping[str, Any]]  # schemas of the arguments of the tools that may be called, by name
    choice: Kind
    only_one: bool  # at most one call is allowed
    # Grammar of the input of the only tool that may be called, whose input is then the whole answer.
    raw: Grammar | None = None
    client_names: Mapping[str, str] = field(default_factory=dict)  # keyed by the model's names, if they differ
    strict: frozenset[str] = frozenset()  # tools whose arguments obey their schemas whenever they are called

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def forced_name(self) -> str | None:
        """The client's name of the only tool that the model can and must call, or None."""
        if not self.is_forced or len(self.schemas) != 1:
            return None
        (name,) = self.schemas
        return self.client_names.get(name, name)


class ToolsBody(Protocol):
    """The fields of a request about calls."""

    @property
    def tool_choice(self) -> ToolChoice | ResponseToolChoice | None: ...

    @property
    def parallel_tool_calls(self) -> bool | None: ...


def requested_tools(
    body: ToolsBody,
    note: Note,
    offered: Mapping[str, Function] = MappingProxyType({}),
    joined: Container[str] = (),
) -> Tools | None:
    """Return the tools for the model, or None without any. `offered` has those of a response, as functions by their
    places, and `joined` the names of those in namespaces."""
    choice = body.tool_choice
    if isinstance(body, ChatBody):
        offered = functions_of(body.tools or [], note)
    if not offered:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", f"is only allowed with 'tools', got {show(msgspec.to_builtins(choice))}")
        return None
    shown = shown_tools([*offered.values()], [*offered], note, joined=joined)
    kind, names = _choice(choice)
    return tools_of(shown, kind, names, note, only_one=kind == "named" or body.parallel_tool_calls is False)


def functions_of(tools: Sequence[Tool], note: Note) -> dict[str, Function]:
    """Return the functions among the tools of a chat by their places, without the other tools."""
    functions: dict[str, Function] = {}
    for number, tool in enumerate(tools):
        if tool.type == "function":
            if tool.function is None:
                raise invalid("tools", "is required for the type 'function'", f"tools[{number}].function")
            functions[f"tools[{number}].function"] = tool.function
        else:
            note(f"tools[{number}]", "a tool that is no function is left out")
    return functions


def tools_of(shown: ShownTools, kind: Kind, names: Iterable[str] | None, note: Note, *, only_one: bool) -> Tools:
    """Return the tools of a request by its choice. `names` are the client's names of the remaining tools; None: all.
    Raises InvalidRequest if there are none, or if one is missing."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in shown.tools}
    clients = {model: client for client, model in shown.names.items() if model != client}
    if kind == "none":
        return Tools(shown.tools, {}, "none", only_one=False, client_names=clients)
    if names is not None:
        named = list(names)
        for name in named:
            if name not in shown.names:
                raise invalid("tool_choice", f"there is no tool with the name {show(name)}")
        if not named:
            raise invalid("tool_choice", "must allow at least one tool, got an empty list")
        schemas = {shown.names[name]: schemas[shown.names[name]] for name in named}
    strict = shown.strict & schemas.keys()
    if kind in ("required", "named"):
        for name in (name for name in schemas if name not in strict):
            note_not_obeyed(msgspec.json.encode(schemas[name]).decode(), shown.places[name], note)
    return Tools(shown.tools, schemas, kind, only_one, client_names=clients, strict=strict)


def _choice(choice: ToolChoice | ResponseToolChoice | None) -> tuple[Kind, Iterable[str] | None]:
    """Return the kind of a choice, and the names of the remaining tools; None: all."""
    match choice:
        case NamedChoice(FunctionName(name)):
            return "named", [name]
        case AllowedChoice(allowed):
            return allowed.mode, [tool.function.name for tool in allowed.tools]
        case ResponseChoice(type="allowed_tools", mode=mode, tools=tools) if mode is not None:
            return mode, [joined_name(tool.namespace, tool.name) for tool in tools or [] if tool.name is not None]
        case ResponseChoice(type="function" | "custom", name=name, namespace=namespace) if name is not None:
            return "named", [joined_name(namespace, name)]
        case ResponseChoice(type=kind):
            if kind in ("function", "custom", "allowed_tools"):
                needed = "mode" if kind == "allowed_tools" else "name"
                raise invalid("tool_choice", f"is required for the type '{kind}'", f"tool_choice.{needed}")
            reason = f"tools of the type {show(kind)} run on OpenAI's servers, so none can be forced"
            raise invalid("tool_choice", reason)
    return choice or "auto", None


def joined_name(namespace: str | None, name: str) -> str:
    """Return the model's name for a function that may be in a namespace."""
    if namespace is None:
        return name
    return f"{namespace}__{name}"
