"""Random values of the types in which the SDKs of OpenAI and Anthropic describe their requests.

The types are read at run time, so that an update of an SDK brings its new kinds of messages, blocks, items and tools.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

IDS = [f"call_{number}" for number in range(4)]  # few, so that results and calls often have the same one
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
ARGUMENTS = [
    *(
        '{"city": "Paris"}',
        "{}",
        "",
        '{"city": "Par',
        "null",
        "[]",
        '"x"',
        "{'city': 'Paris'}",
        '{"a": {"b": [1, null]}}',
    ),
    *(
        "NaN",
        '{"n": 12345678901234567890}',
        "[1, 2]",
        "{}{}",
        "\ufeff{}",
        '{"a": "\\ud83d"}',
        "  ",
        '{"": 1, "</think>": 2}',
    ),
]
MOST_DEPTH = 8


@cache
def fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a TypedDict by its name in JSON, and whether the field is required."""
    hints = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        is_required = kind.__total__
        while (origin := get_origin(hint)) in (Required, NotRequired, Annotated):
            if origin is Annotated:
                name = next(filter(None, (getattr(one, "alias", None) for one in hint.__metadata__)), name)
            else:
                is_required = origin is Required
            hint = get_args(hint)[0]
        hints[name] = hint, is_required
    return hints


def kinds(union: Any) -> list[Any]:
    """Return the TypedDicts in a type, without those nested in other TypedDicts."""
    if _is_object(union):
        return [union]
    if get_origin(union) in (Union, types.UnionType, Annotated, Required, NotRequired):
        return [kind for one in get_args(union) for kind in kinds(one)]
    return []


def items(hint: Any) -> Any:
    """Return the type of the items of a field that is, among other types, a list."""
    for one in (hint, *get_args(hint)):
        if get_origin(one) is not None and _is_list(get_origin(one)):
            return get_args(one)[0]
    raise TypeError(f"{hint} is no list")


def _is_list(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, dict)


def _is_object(kind: Any) -> bool:
    """Return whether a type is a TypedDict of `typing` or of `typing_extensions`."""
    return hasattr(kind, "__total__")


class Writer:
    """Writes random values of types. Each text has a number of its own, by which a prompt can be searched for it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self._num_texts = 0

    def text(self) -> str:
        self._num_texts += 1
        odd = ["", "", "", " ß日本👩‍👧", "\n\n</think>", "<tool_call>{}</tool_call>", "{{ x }}{% y %}", '"\\']
        return f"word{self._num_texts}end{self.random.choice(odd)}"

    def value(self, hint: Any, name: str = "", depth: int = 0) -> Any:
        """Return a value of a type. `name` is the field that it is for, which says what a string is to be."""
        random = self.random
        origin = get_origin(hint)
        arguments = get_args(hint)
        if _is_object(hint):
            return self.object(hint, depth)
        if origin in (Required, NotRequired, Annotated):
            return self.value(arguments[0], name, depth)
        if origin is Literal:
            return random.choice(arguments)
        if origin in (Union, types.UnionType):
            plain = [one for one in arguments if not kinds(one)] if depth >= MOST_DEPTH else []
            return self.value(random.choice(plain or arguments), name, depth)
        if origin is dict or hint is dict or (isinstance(origin, type) and issubclass(origin, dict)):
            return {"city": self.value(arguments[1] if arguments else object, "value", depth + 1)}
        if origin is not None and _is_list(origin):
            number = random.choice((0, 1, 1, 2)) if depth < MOST_DEPTH else 0
            return [self.value(arguments[0], name, depth + 1) for _ in range(number)]
        if hint is type(None):
            return None
        if hint is bool:
            return random.random() < 0.5
        if hint in (int, float):
            return random.choice((0, 1, 3, 5000)) if hint is int else random.choice((0.0, 0.5, 1.0))
        if hint is str:
            return self.string(name)
        if name in ("input", "arguments"):
            return random.choice(({}, {"city": "Paris"}, {"a": [1, {"b": None}], "": ""}))
        if name in ("parameters", "input_schema", "schema"):
            return random.choice(({}, {"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}}))
        if hint not in (object, Any):
            return self.string(name)  # what an SDK reads from a file, such as base64
        return random.choice((self.text(), 1, None, ["a"], {"a": self.text()}, True))

    def object(self, kind: Any, depth: int = 0) -> dict[str, Any]:
        """Return a value of a TypedDict, with some of its optional fields."""
        most = 0.35 if depth < 4 else 0.1
        written = {
            name: self.value(hint, name, depth + 1)
            for name, (hint, is_required) in fields(kind).items()
            if is_required or self.random.random() < most
        }
        if isinstance(written.get("type"), str) and not isinstance(written.get("media_type", ""), str):
            del written["media_type"]
        return written

    def string(self, name: str) -> str:
        random = self.random
        if name in ("id", "call_id", "tool_use_id", "tool_call_id", "approval_request_id"):
            return random.choice(IDS)
        if name in ("arguments", "partial_json"):
            return random.choice(ARGUMENTS)
        if name in ("name", "tool_name", "server_label", "server_name", "namespace"):
            return random.choice(("get_weather", "mcp__files__read", "x" * 64))
        if name in ("data", "file_data", "result"):
            return PNG
        if name in ("image_url", "url"):
            return random.choice((f"data:image/png;base64,{PNG}", "https://example.com/a.png"))
        if name in ("input", "code", "diff", "output", "content", "text", "title", "source"):
            return self.text()
        return random.choice((self.text(), "x", json.dumps({"a": 1})))

    def some(self, of: Sequence[Any], most: int) -> list[Any]:
        return [self.random.choice(of) for _ in range(self.random.randint(1, most))]
