"""The tools of a request in the form that the model sees.

Clients pass on other people's tools. Unless a tool is strict, odd names and schemas are read leniently, and noted.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oaiserve.routes.adaptations import Note
from oaiserve.routes.intake.body_types import MAX_TOOLS
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import MAX_TOOL_NAME, Function

_ODD = re.compile(r"[^A-Za-z0-9_.-]")  # Every dialect of calls can write the other characters.


@dataclass(frozen=True, slots=True)
class ShownTools:
    """The tools in the form of the API, the model's names for them by the client's, and the strict ones."""

    tools: Sequence[dict[str, Any]] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()  # names as the model sees them
    # Where the request has the schema of each tool, by the model's names.
    places: Mapping[str, str] = field(default_factory=dict)


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
    """Read the tools of a request. In errors and notes, `where` has the places of the functions, and `schema_field`
    that of their schemas. Only the `joined` names may be longer, since they have two parts."""
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
