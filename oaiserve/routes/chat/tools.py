"""The tools of a request, the choice of those that the model may or must call, and their place in the prompt.

The entries of /v1/responses, which have the function's fields next to the type, are translated. Each refusal is an
`InvalidRequest` that names the parameter.

A chat template gets the parts that it can show: tools, calls and results. The others become text: a system message with
the tools, calls in the dialect of the answer's parser, and results as a turn of the user. This file knows nothing of
answers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec

from oaiserve.engine.grammars.json_schema.prepare import prepare_leniently
from oaiserve.engine.request import ChatPrompt, Grammar
from oaiserve.routes.adaptations import Note
from oaiserve.routes.chat.shown_tools import ShownTools, model_name, shown_tools
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.dialects.family import CallFamily, Message
from oaiserve.routes.dialects.hermes import HERMES
from oaiserve.routes.intake.body_types import ChatBody
from oaiserve.routes.intake.invalid import invalid, needed, show
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
from oaiserve.wire.prefix_keys import SYSTEM_ROLES, without_billing

Kind = Literal["none", "auto", "required", "named"]
MOST_REMEMBERED = 2**13  # characters of a schema
# A schema with one of these decides itself which properties are allowed besides `properties`.
_KEYS_OF_PROPERTIES = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf", "if", "minProperties"),
}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. `choice` is its `tool_choice`; "named" forces a call of a certain tool."""

    shown: Sequence[Mapping[str, Any]]  # tools that the model sees, in the form of the API
    schemas: Mapping[str, Mapping[str, Any]]  # schemas of the arguments of the tools that may be called, by name
    choice: Kind
    only_one: bool  # at most one call
    # Grammar of the input of the only tool that may be called, whose input is then the whole answer.
    raw: Grammar | None = None
    client_names: Mapping[str, str] = field(default_factory=dict)  # by the model's, where they differ
    strict: frozenset[str] = frozenset()  # tools whose arguments obey their schemas whenever they are called

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")


class ToolsBody(Protocol):
    """What a request says of calls."""

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
            functions[f"tools[{number}].function"] = needed(f"tools[{number}]", tool, "function")
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
            for keyword in _not_obeyed(msgspec.json.encode(schemas[name]).decode()):
                if keyword:
                    what = f"'{keyword}' is not enforced"
                else:
                    what = "the schema is not enforced"
                note(shown.places[name], what)
    return Tools(shown.tools, schemas, kind, only_one, client_names=clients, strict=strict)


def _not_obeyed(schema: str) -> Sequence[str]:
    """Return the keywords of a schema that no grammar can enforce; "" if there are none. The results for short schemas
    are remembered, since a session sends the same tools with each request."""
    if len(schema) <= MOST_REMEMBERED:
        return remembered(schema)
    return prepare_leniently(schema)[1]


@lru_cache(1024)
def remembered(schema: str) -> Sequence[str]:
    return prepare_leniently(schema)[1]


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
            raise invalid("tool_choice", f"tools of the type '{kind}' run on OpenAI's servers, so none can be forced")
    return choice or "auto", None


def joined_name(namespace: str | None, name: str) -> str:
    """Return the model's name for a function that may be in a namespace."""
    if namespace is None:
        return name
    return f"{namespace}__{name}"


def forced_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema for forced arguments, without further properties, which a forced model would invent for ever."""
    if schema.keys() & _KEYS_OF_PROPERTIES:
        return schema
    listed = schema.get("properties", {})
    unlisted = {name: True for name in schema.get("required", ()) if name not in listed}
    return {**schema, "properties": {**listed, **unlisted}, "additionalProperties": False}


_EXAMPLE = ("name-of-the-function", '{"name-of-an-argument": "its value"}')


def _without_billing(messages: Iterable[Message]) -> Iterator[Message]:
    for message in messages:
        if message["role"] not in SYSTEM_ROLES:
            yield message
        elif (content := without_billing(message["content"])) or not message["content"]:
            yield {**message, "content": content}


def prompt_with_tools(
    messages: Iterable[Message], shown: Sequence[Mapping[str, Any]], dialect: Dialect, **more: Any
) -> ChatPrompt:
    """Return the prompt of checked messages, with a description of the tools `shown`. `more` are its other fields."""
    family = dialect.calls or HERMES
    abilities = dialect.abilities
    history = [_with_model_names(message) for message in _without_billing(messages)]
    history = history if family.history is None else list(family.history(history))
    result: list[Message] = []
    for is_result, messages in groupby(history, lambda one: one["role"] == "tool" and not abilities.results):
        if is_result:
            texts = [_joined("<tool_response>\n", one["content"], "\n</tool_response>") for one in messages]
            between = [each for text in texts for each in ("\n", text)]
            result.append({"role": "user", "content": _joined(*between[1:])})
            continue
        for message in messages:
            if not abilities.calls and (calls := message.pop("tool_calls", None)):
                functions = (call["function"] for call in calls)
                written = (family.in_text or family.written)(
                    (one["name"], one["arguments"] or "{}") for one in functions
                )
                message["content"] = "\n".join(filter(None, (text_of(message["content"]), written)))
            result.append(message)
    if abilities.tools:
        return ChatPrompt(result, tools=shown, **more)
    return ChatPrompt(_introduced(result, shown, family) if shown else result, **more)


def _with_model_names(message: Message) -> Message:
    changed = dict(message)
    if message["role"] == "tool" and isinstance(name := message.get("name"), str):
        changed["name"] = model_name(name)
    if calls := message.get("tool_calls"):
        functions = ({**call["function"], "name": model_name(call["function"]["name"])} for call in calls)
        changed["tool_calls"] = [{**call, "function": one} for call, one in zip(calls, functions, strict=True)]
    return changed


def _introduced(messages: list[Message], shown: Sequence[Mapping[str, Any]], family: CallFamily) -> list[Message]:
    tools = "\n".join(msgspec.json.encode(tool["function"]).decode() for tool in shown)
    introduction = (
        f"You may call functions. Each of these lines describes one:\n{tools}\n\n"
        f"To call a function, write this, with a JSON object of its arguments:\n{family.written([_EXAMPLE])}"
    )
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": _joined(f"{introduction}\n\n", messages[0]["content"])}
        return [first, *messages[1:]]
    return [{"role": "system", "content": introduction}, *messages]


def text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _joined(*contents: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """Return contents one after the other: as a text, or as parts if there is another medium among them."""
    plain = [
        text_of(one) if all("text" in part for part in one) else one for one in contents if not isinstance(one, str)
    ]
    if all(isinstance(one, str) for one in plain):
        return "".join(map(text_of, contents))
    lists = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents)
    return [part for each in lists for part in each]
