"""Errors about bodies: the fault, its place, the value, and the allowed values. msgspec's messages become sentences."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from oaiserve.errors import InvalidRequest
from oaiserve.errors import invalid as invalid

Kind = TypeVar("Kind", bound=msgspec.Struct)
_JSON_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
_EXPECTED = re.compile(r"Expected `(.+?)`(?:, got `(.+?)`)?")
_MISSING = re.compile(r"Object missing required field `(.+?)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`", re.DOTALL)
_NOT_ALLOWED = re.compile(r"Invalid (?:enum )?value ('.*')", re.DOTALL)
# What to use instead of words and names that other servers have.
_INSTEAD = {
    "structural_tag": "Use a JSON Schema, or a Lark grammar with '%json' in 'structured_outputs.grammar'.",
}
_PATH = " - at `$"  # before the path, which ends the message


def invalid_type(body: type[msgspec.Struct], text: str) -> InvalidRequest:
    """Turn msgspec's message, such as ``Expected `float | null`, got `str` - at `$.temperature` ``, into an error."""
    before, mark, path = text.rpartition(_PATH)
    if mark and path.endswith("`"):
        text = before
        path = path[:-1].removeprefix(".")
    else:
        path = ""
    foreign = ""
    if missing := _MISSING.search(text):
        place = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"Missing required parameter: '{place}'.", param=_top(place))
    if unknown := _UNKNOWN.search(text):
        path = f"{path}.{unknown[1][:60]}"
        reason = "is not supported"
    elif not_allowed := _NOT_ALLOWED.search(text):
        # Several structs may be allowed here, and a word of one may be wrong in another, so it isn't listed.
        *most, last = [word for word in map(repr, _allowed(body, path)) if word != not_allowed[1]]
        words = f"{', '.join(most)} or {last}" if most else last
        reason = f"must be {words}, got {_cut(not_allowed[1])}"
        foreign = not_allowed[1].strip("'")
    elif text.startswith("Expected `null`"):
        reason = "is not supported"
        foreign = path.rpartition(".")[2]
    elif expected := _EXPECTED.search(text):
        wanted = [name for name in expected[1].split(" | ") if name != "null"]
        if "int" in wanted:
            wanted = [name for name in wanted if name != "float"]  # see Integer
        kinds = " or ".join(_JSON_TYPES.get(name, name) for name in wanted)
        if expected[2] == "bool":
            got = "a boolean"
        else:
            got = _JSON_TYPES.get(expected[2], "another type")
        reason = f"must be {kinds}, got {got}"
    elif text.endswith("out of range"):
        reason = "number out of range: it must be within ±1.8e308, and have at most 4,300 digits if it is an integer"
    else:
        reason = text[:1].lower() + text[1:]
    if foreign in _INSTEAD:
        reason += f". {_INSTEAD[foreign].removesuffix('.')}"
    if not path:
        return InvalidRequest(f"Invalid body: {reason}.")
    return InvalidRequest(f"Invalid '{path}': {reason}.", param=_top(path))


def converted(kind: type[Kind], value: object, where: str) -> Kind:
    """Return a value in a body as a struct. Raises InvalidRequest."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = invalid_type(kind, str(error)).message.replace("Invalid body", f"Invalid '{where}'", 1)
        if where in message:
            inner = message
        else:
            inner = message.replace("'", f"'{where}.", 1)
        raise InvalidRequest(inner, param=_top(where)) from None


def _top(path: str) -> str | None:
    return re.split(r"[.\[]", path)[0] or None


def _allowed(body: type[msgspec.Struct], path: str) -> list[str]:
    """Return the words that are allowed at a place such as messages[0].role; none if others are allowed, too."""
    nodes = members(inspect.type_info(body))
    for step in re.findall(r"[^.\[]+", path):
        is_entry = step.endswith("]")
        inner: list[inspect.Type] = []
        for node in nodes:
            if isinstance(node, inspect.StructType) and not is_entry:
                inner += [field.type for field in node.fields if field.encode_name == step]
                inner += [inspect.LiteralType((node.tag,))] if node.tag_field == step else []
            elif isinstance(node, inspect.ListType) and is_entry:
                inner.append(node.item_type)
        nodes = [member for each in inner for member in members(each)]
    words = [value for node in nodes if isinstance(node, inspect.LiteralType) for value in node.values]
    return [word for word in dict.fromkeys(words) if isinstance(word, str)]


def members(node: inspect.Type) -> list[inspect.Type]:
    if isinstance(node, inspect.Metadata):
        return members(node.type)
    if isinstance(node, inspect.UnionType):
        return [member for each in node.types for member in members(each)]
    return [node]


def show(value: object) -> str:
    """Return a client's value as an error message quotes it, cut to 60 characters."""
    return _cut(repr(value) if isinstance(value, str) else str(value))


def _cut(text: str) -> str:
    if len(text) <= 60:
        return text
    return text[:60] + "..."


def needed(where: str, holder: Any, name: str) -> Any:
    """Return a field that the type of a tool or an item requires. Raises InvalidRequest if it is missing."""
    if (value := getattr(holder, name)) is None:
        kind = holder.type or "message"
        raise invalid(where.partition("[")[0], f"is required for the type '{kind}'", f"{where}.{name}")
    return value
