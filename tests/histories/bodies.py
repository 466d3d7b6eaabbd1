"""Bodies of the three APIs for conversations: histories of all kinds of messages, blocks and items, and other people's
tools. Some are changed as foreign servers, cut answers and careless clients leave them."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from types import ModuleType
from typing import Any

from openai.types import chat, responses

from tests.histories.sdk_values import ARGUMENTS, IDS, Writer, fields, items, kinds

Body = dict[str, Any]
MODEL = "demo"
LONG_NAME = "mcp__" + "very_long_server_name_" * 5 + "search"
PATTERNS = (
    *(r"^[\w-\.]+(?!x)$", r"\bword\b", r"\A[a-z]+\Z", "(?i)^abc$", r"^\p{L}+$"),
    *("(?<=a)b", "[", "^a{1,99999}$"),
)
PROPERTIES: list[Body] = [
    {},
    {"city": {"type": "string"}},
    {"id": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}},
    {"id": {"type": "integer", "maximum": 2**64 - 1, "default": 2**64 - 1}},
    {"when": {"type": "string", "format": "duration-ish"}},
    {"tags": {"type": "array", "uniqueItems": True, "contains": {"type": "integer"}}},
    *({"slug": {"type": "string", "pattern": pattern}} for pattern in PATTERNS),
    {"a": {"type": ["string", "null"], "enum": ["x", None]}, "b": {"const": 2**70}},
    {"a": {"$ref": "https://example.com/schema.json"}, "b": {"$ref": "#/$defs/none"}, "c": {"$ref": "#"}},
    {"a": {"type": "string", "minLength": 3, "maxLength": 1}},
    {"deep": {"type": "object", "patternProperties": {"^x-": {"type": "string"}}}},
    {"a": {"description": None, "type": "string", "nullable": True, "example": 1}},
    {"a": None, "b": []},
    {"a": {"type": "any"}, "b": True, "c": {"type": {"x": 1}}, "d": {"type": [["x"]]}, "e": {"type": [{}, 1, None]}},
    {"type": {"type": "string"}, "properties": {"type": "object"}, "required": {"type": "array"}, "$ref": {}},
]
SCHEMAS: list[Body] = [
    *({"type": "object", "properties": properties} for properties in PROPERTIES),
    *({}, {"type": "object"}, {"type": ["object", "null"], "properties": None}, {"properties": {}, "required": None}),
    {"type": "object", "not": {"required": ["nothing"]}, "properties": {"a": {"not": {}}}},
    {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}, "properties": {"a": {}, "b": {}}},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}},
    {
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
        "properties": {"a": {"$ref": "#/$defs/node"}},
    },
    {"type": "object", "dependencies": {"a": ["b"]}, "propertyNames": {"pattern": "^a"}},
    {"anyOf": [{"type": "object", "properties": {"a": {"type": "string"}}}, {"type": "object"}]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": False},
]


@cache
def anthropic_types() -> ModuleType:
    """Return the types of Anthropic's newest API. Where its SDK is not installed, it is fetched."""
    if importlib.util.find_spec("anthropic") is None:
        from tests.real.artefacts import ANTHROPIC, fetched

        sys.path.append(str(fetched(ANTHROPIC)))
    return importlib.import_module("anthropic.types.beta")


class Bodies:
    """Writes bodies for each of the three APIs."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self._writer = Writer(self.random)

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def chat(self) -> Body:
        writer = self._writer
        of = kinds(chat.ChatCompletionMessageParam)
        messages: list[Body] = []
        for kind in writer.some(of, 5):
            message = writer.object(kind)
            messages.append(message)
            calls = message.get("tool_calls") or []
            if self.chance(0.8):
                messages += [{"role": "tool", "tool_call_id": one["id"], "content": writer.text()} for one in calls]
            if self.chance(0.5):
                messages.append({"role": "user", "content": writer.text()})
        messages.append({"role": "user", "content": writer.text()})
        body: Body = {"model": MODEL, "messages": self._changed(messages), "max_tokens": 4}
        if self.chance(0.5):
            tools = [writer.object(kind) for kind in writer.some(kinds(chat.ChatCompletionToolUnionParam), 3)]
            for number, tool in enumerate(tools):
                inner = tool.get(tool["type"], {})
                inner["name"] = self._name(number)
                if tool["type"] == "function":
                    self._describe(inner, "parameters")
            body |= self._offered(tools)
        return body

    def responses(self) -> Body:
        writer = self._writer
        of = kinds(responses.ResponseInputItemParam)
        items = [writer.object(kind) for kind in writer.some(of, 7)]
        items = [item for item in items if item.get("type") not in ("compaction_trigger", "item_reference")]
        items = [item for item in items if "role" in item or item.get("type")]  # a reference needs no type
        items.append({"role": "user", "content": writer.text()})
        body: Body = {"model": MODEL, "input": self._changed(items), "max_output_tokens": 16}
        if self.chance(0.5):
            tools = [writer.object(kind) for kind in writer.some(kinds(responses.ToolParam), 3)]
            for number, tool in enumerate(tools):
                if "name" in tool:
                    tool["name"] = self._name(number)
                if tool["type"] == "function":
                    self._describe(tool, "parameters")
            body |= self._offered(tools)
        return body

    def messages(self) -> Body:
        beta = anthropic_types()
        writer = self._writer
        random = self.random
        by_role = {fields(kind)["role"][0].__args__[0]: kind for kind in kinds(beta.BetaMessageParam)}
        turns: list[Body] = []
        for role in self._roles():
            blocks = kinds(items(fields(by_role[role])["content"][0]))
            content: Any = [writer.object(kind) for kind in writer.some(blocks, 4)]
            if self.chance(0.3):
                content = writer.text()
            turns.append({"role": role, "content": content})
            called = [one["id"] for one in content if isinstance(one, dict) and one.get("type") == "tool_use"]
            if called and self.chance(0.8):
                results = [{"type": "tool_result", "tool_use_id": one, "content": writer.text()} for one in called]
                turns.append({"role": "user", "content": results})
        turns.append({"role": "user", "content": writer.text()})
        body: Body = {"model": MODEL, "messages": self._changed(turns), "max_tokens": 4}
        if self.chance(0.3):
            body["system"] = random.choice((writer.text(), [{"type": "text", "text": writer.text()}], [], ""))
        if self.chance(0.5):
            tools = [writer.object(kind) for kind in writer.some(kinds(beta.BetaToolUnionParam), 3)]
            for number, tool in enumerate(tools):
                if "input_schema" in tool:
                    tool["name"] = self._name(number)
                    self._describe(tool, "input_schema")
            body["tools"] = tools
            if all("input_schema" in tool for tool in tools) and self.chance(0.5):
                body["tool_choice"] = {"type": random.choice(("auto", "any", "none"))}
        return body

    def _offered(self, tools: list[Body]) -> Body:
        """Return the fields of chat and responses with these tools and, where a function is among them, a choice."""
        if any(tool["type"] == "function" for tool in tools) and self.chance(0.5):
            return {"tools": tools, "tool_choice": self.random.choice(("auto", "required", "none"))}
        return {"tools": tools}

    def _roles(self) -> list[str]:
        number = self.random.randint(0, 4)
        if self.chance(0.8):
            return [("user", "assistant")[place % 2] for place in range(number)]
        return [self.random.choice(("user", "assistant", "system")) for _ in range(number)]

    def _name(self, number: int) -> str:
        return self.random.choice((f"get_{number}", f"mcp__files__{number}", f"{number}{LONG_NAME}"))

    def _describe(self, tool: Body, field: str) -> None:
        """Give a tool a schema that somebody else has written. It is not strict, since nobody could promise that."""
        tool[field] = copy.deepcopy(self.random.choice(SCHEMAS))
        tool.pop("strict", None)

    def _changed(self, history: list[Body]) -> list[Body]:
        """Return the history after up to two changes; its last turn stays."""
        for _ in range(self.random.choice((0, 0, 1, 2))):
            self.random.choice(CHANGES)(history, self.random)
        return history


def _drop(history: list[Body], random: Random) -> None:
    """Leave out an entry, so that a call or a result is alone."""
    if len(history) > 1:
        del history[random.randrange(len(history) - 1)]


def _swap(history: list[Body], random: Random) -> None:
    if len(history) > 2:
        first, second = (random.randrange(len(history) - 1) for _ in range(2))
        history[first], history[second] = history[second], history[first]


def _repeat(history: list[Body], random: Random) -> None:
    history.insert(0, copy.deepcopy(random.choice(history)))


def _unknown(history: list[Body], random: Random) -> None:
    """Add a block or an item of a kind that nobody has invented yet."""
    future = {
        "type": "hologram_result",
        "id": "h1",
        "tool_use_id": IDS[0],
        "content": [{"type": "hologram", "text": "x"}],
    }
    entry = random.choice(history)
    if isinstance(entry.get("content"), list) and random.random() < 0.7:
        entry["content"].insert(random.randint(0, len(entry["content"])), future)
    elif "role" not in history[0] or any("role" not in one for one in history):
        history.insert(0, future)


def _cut(history: list[Body], random: Random) -> None:
    """Write the arguments of all calls as they are after an answer that was cut, or by a model that errs."""
    for place in _objects(history):
        if isinstance(place.get("arguments"), str):
            place["arguments"] = random.choice(ARGUMENTS)


def _empty(history: list[Body], random: Random) -> None:
    entry = random.choice(history[:-1] or [{}])
    if "content" in entry:
        entry["content"] = random.choice(("", []))


def _more(history: list[Body], random: Random) -> None:
    """Add fields that another server writes."""
    for place in _objects(history):
        if random.random() < 0.3:
            place |= {"x_score": None, "annotations": [], "provider_specific_fields": {"a": 1}, "cache_control": None}


def _objects(value: Any) -> Iterator[Body]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


CHANGES: list[Callable[[list[Body], Random], None]] = [_drop, _swap, _repeat, _unknown, _cut, _empty, _more]
