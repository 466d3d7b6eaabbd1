"""The tools of a request, and the choice of those that the model may or must call.

The entries of /v1/responses, which have the function's fields next to the type, are translated. Clients pass on other
people's tools. Unless a tool is strict, odd names and schemas are read leniently, and noted. Each refusal is an
`InvalidRequest` that names the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec

from oaiserve.engine.request import Grammar
from oaiserve.routes.adaptations import Note
from oaiserve.routes.chat.constraints import note_not_obeyed
from oaiserve.routes.intake.body_types import MAX_TOOLS, ChatBody
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import (
    MAX_TOOL_NAME,
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
_ODD = re.compile(r"[^A-Za-z0-9_.-]")  # Every call dialect can write the other characters.


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


@dataclass(frozen=True, slots=True)
class ShownTools:
    """The tools in the form of the API, the model's names for them keyed by the client's, and the names of strict
    tools."""

    tools: Sequence[dict[str, Any]] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()  # names as the model sees them
    # The place of each tool's schema in the request, keyed by the model's names.
    places: Mapping[str, str] = field(default_factory=dict)


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
    """Return the tools for the model, or None without any. `offered` has the tools of a response, as functions keyed by
    their places, and `joined` the names of those in namespaces."""
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


def model_name(name: str) -> str:
    """Return the model's name for a tool: '_' replaces characters that some dialects cannot write."""
    return _ODD.sub("_", name)


def shown_tools(
    functions: Sequence[Function],
    where: Sequence[str],
    note: Note,
    schema_field: str = "parameters",
    joined: Container[str] = (),
) -> ShownTools:
    """Read the tools of a request. For errors and notes, `where` has the places of the functions, and `schema_field`
    names the field with the schema. Only the `joined` names may be longer, since they have two parts."""
    if len(functions) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} are allowed, got {len(functions)}")
    tools: dict[str, dict[str, Any]] = {}  # keyed by the client's names
    for place, function in zip(where, functions, strict=True):
        name = function.name
        if not 1 <= len(name) <= MAX_TOOL_NAME and name not in joined:
            raise invalid("tools", f"must have 1 to {MAX_TOOL_NAME} characters, got {show(name)}", f"{place}.name")
        shown = _shown(function, _parameters(function, f"{place}.{schema_field}", note))
        if name not in tools:
            tools[name] = shown
        elif tools[name] != shown:
            if function.strict or tools[name].get("strict"):
                raise invalid("tools", f"two have the name {show(name)}, and at least one of them is strict")
            note(place, "left out, as an earlier tool has its name")
    names = _model_names(tools)
    places: dict[str, str] = {}
    for place, function in zip(where, functions, strict=True):
        places.setdefault(names[function.name], f"{place}.{schema_field}")
        if names[function.name] != function.name:
            note(f"{place}.name", "shown to the model in other characters")
    for name, shown in tools.items():
        shown["name"] = names[name]
    strict = frozenset(shown["name"] for shown in tools.values() if shown.get("strict"))
    return ShownTools([{"type": "function", "function": shown} for shown in tools.values()], names, strict, places)


def _model_names(names_in_request: Iterable[str]) -> dict[str, str]:
    """Return a unique name for each tool. Names without odd characters stay the same."""
    names = {name: name for name in names_in_request if not _ODD.search(name)}
    taken = set(names)
    for name in names_in_request:
        if name in names:
            continue
        unique = model_name(name)
        number = 1
        while unique in taken:
            number += 1
            unique = f"{model_name(name)}_{number}"
        names[name] = unique
        taken.add(unique)
    return names


def _shown(function: Function, parameters: dict[str, Any]) -> dict[str, Any]:
    fields = {
        "name": function.name,
        "description": function.description,
        "parameters": parameters,
        "return": function.returns,
        "strict": function.strict,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _parameters(function: Function, place: str, note: Note) -> dict[str, Any]:
    schema = dict(function.parameters or {"properties": {}})

    def adapt(key: str, wanted: str, what: str) -> None:
        if function.strict:
            raise invalid("tools", f"must be {wanted}, got {show(schema[key])}", f"{place}.{key}")
        note(f"{place}.{key}", what)

    kind = schema.pop("type", "object")
    if kind != "object":
        schema["type"] = kind
        if not (isinstance(kind, list) and "object" in kind):
            adapt("type", "'object'", "read as 'object'")
        del schema["type"]
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        adapt("properties", "an object", "left out, as it is no object")
        schema["properties"] = {}
    elif not all(isinstance(each, dict | bool) for each in properties.values()):
        adapt("properties", "an object of schemas", "what is no schema is read as any value")
        schema["properties"] = {
            name: each if isinstance(each, dict | bool) else {} for name, each in properties.items()
        }
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        adapt("required", "a list of names", "left out, as it is no list of names")
        del schema["required"]
    return {"type": "object", **schema}
