"""The tools that a client offers with a response, as functions for the model, and their calls in the API's form.

A function of a namespace gets a joined name. A custom tool becomes a function with one argument, its input. Tools that
run on OpenAI's servers are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from oaiserve.engine.request import Grammar
from oaiserve.plugins.responses.body import InputBody, InputFormat, ResponseTool
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.chat.tools import Tools, joined_name, requested_tools
from oaiserve.routes.dialects.raw_call import INPUT
from oaiserve.routes.intake.invalid import converted, invalid, needed
from oaiserve.routes.intake.object_types import Function, ResponseChoice

BRINGING_TOOLS = ("additional_tools", "tool_search_output")  # types of items
_INPUT_SCHEMA = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a request. `left_out` has the types of those that run elsewhere, in order."""

    tools: Tools | None
    namespaces: Mapping[str, tuple[str, str]]  # namespaces, and names in them, by joined names
    custom: frozenset[str]
    left_out: tuple[str, ...]


def with_arrived(body: InputBody, items: Iterable[tuple[str, Mapping[str, Any]]]) -> InputBody:
    """Return a request with the tools that the items in its conversation bring, each with its place. A tool that is
    there already stays as it is. Raises InvalidRequest."""
    tools = list(body.tools or [])
    known = {(tool.type, tool.name) for tool in tools}
    for where, item in items:
        arrived = item.get("tools")
        for number, raw in enumerate(arrived if isinstance(arrived, list) else []):
            tool = converted(ResponseTool, raw, f"{where}.tools[{number}]")
            if (tool.type, tool.name) not in known:
                known.add((tool.type, tool.name))
                tools.append(tool)
    if len(tools) == len(body.tools or []):
        return body
    return msgspec.structs.replace(body, tools=tools)


def offered_tools(body: InputBody, adaptations: Adaptations) -> OfferedTools:
    """Read the tools of a request. Raises InvalidRequest."""
    functions: dict[str, Function] = {}  # functions by their places
    namespaces: dict[str, tuple[str, str]] = {}
    formats: dict[str, InputFormat | None] = {}
    left_out: list[str] = []
    for number, tool in enumerate(body.tools or []):
        where = f"tools[{number}]"
        match tool.type:
            case "function":
                name = needed(where, tool, "name")
                functions[where] = Function(
                    name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
                )
            case "custom":
                name = needed(where, tool, "name")
                formats[name] = tool.format
                description = "\n".join(filter(None, (tool.description, _described(tool.format))))
                functions[where] = Function(name=name, description=description or None, parameters=_INPUT_SCHEMA)
            case "namespace":
                namespace = needed(where, tool, "name")
                about = tool.description
                for place, function in enumerate(needed(where, tool, "tools")):
                    if function.type != "function":
                        adaptations.note(f"{where}.tools[{place}]", "a tool that is no function is left out")
                        continue
                    name = joined_name(namespace, function.name)
                    namespaces[name] = namespace, function.name
                    described = "\n".join(filter(None, (about, function.description)))
                    functions[f"{where}.tools[{place}]"] = msgspec.structs.replace(
                        function, name=name, description=described or None
                    )
                    about = None  # Only the first function repeats the description of its namespace.
            case hosted:
                adaptations.note(where, "a tool that runs elsewhere is left out")
                left_out.append(hosted)
    choice = body.tool_choice
    if not functions and left_out:
        if isinstance(choice, ResponseChoice) or choice == "required":
            raise invalid("tool_choice", "forces a call, but all tools of the request run on OpenAI's servers")
        return OfferedTools(None, namespaces, frozenset(), tuple(left_out))
    tools = requested_tools(body, adaptations.note, functions, namespaces)
    if tools is not None and tools.forced_name is not None:
        form = formats.get(tools.forced_name)
        if form is not None and form.type == "grammar" and form.definition is not None:
            tools = replace(tools, raw=Grammar(form.syntax or "lark", form.definition, "tools"), only_one=True)
    return OfferedTools(tools, namespaces, frozenset(formats), tuple(left_out))


def input_of(arguments: str) -> str:
    """Return the input in the arguments of a call of a custom tool. If there is none, return the arguments."""
    try:
        value: Any = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    if isinstance(text, str):
        return text
    return arguments


def arguments_of(text: str) -> str:
    return msgspec.json.encode({INPUT: text}).decode()


def _described(form: InputFormat | None) -> str:
    if form is None or form.definition is None:
        return ""
    if form.syntax == "regex":
        notation = "regular expression"
    else:
        notation = "Lark grammar"
    return f"The input follows this {notation}:\n{form.definition}"
