"""Errors and forms of what clients send are found, and messages repaired, in time linear in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import msgspec

from oaiserve.engine.text.template_abilities import in_turns, one_call_each
from oaiserve.routes.chat.constraints import GBNF_DEFINITION
from oaiserve.routes.intake.body_types import ChatBody
from oaiserve.routes.intake.invalid import invalid_type
from tools.attack.functions.linear import Case, repeated

Message = dict[str, Any]

Prompts = tuple[list[int], list[int]]  # the tokens of two prompts, in which 0 ends a line

PROMPTS: dict[str, Callable[[int], Prompts]] = {
    "the same line again and again": lambda size: ([1, 0] * size, [2, 0, *[1, 0] * size, 3, 0]),
    "every second line": lambda size: (numbered(size, 1), numbered(size, 2)),
    "the lines in reverse": lambda size: (numbered(size, 1), numbered(size, 1)[::-1]),
}
WORDS = (" - at `$.", " - at `$`", "Expected `", "Invalid value '", "Object missing required field `")


def cases() -> Iterator[Case]:
    for unit in WORDS:
        for end in ("", "\n", "`"):
            yield Case(f"refused {unit!r}, {end!r}", refusing(repeated("", unit, end)), 5000)
    for unit in ("\n", " ", "a", "a\n", "a ", "-\n"):
        yield Case(f"GBNF or Lark, {unit!r}", searching_gbnf(repeated("", unit)), 5000)
    yield Case("messages in turns", lambda number: in_turns(said(number)), 1000)
    yield Case("messages with one call each", lambda number: one_call_each(called(number)), 1000)
    if find_spec("oaiserve.plugins.inspector") is not None:
        for name, prompts in PROMPTS.items():
            yield Case(f"differences of prompts, {name}", comparing(prompts), 5000)
    if find_spec("oaiserve.plugins.responses") is not None:
        from oaiserve.plugins.responses.request_input import _cuts

        yield Case("cuts of input items", lambda number: _cuts(answered(number)), 1000)


def numbered(size: int, token_id: int) -> list[int]:
    """Return different lines, each followed by one of this token."""
    return [each for number in range(size) for each in (9 + number, 0, token_id, 0)]


def comparing(prompts: Callable[[int], Prompts]) -> Callable[[int], object]:
    from oaiserve.plugins.inspector.changes import changes_of

    def compare(size: int) -> object:
        before, now = prompts(size)
        return changes_of(before, now, lambda token_id: token_id == 0)

    return compare


def refusing(text: Callable[[int], str]) -> Callable[[int], str]:
    """Return a function that sends a text in place of a word, and returns the message that refuses it."""

    def refuse(size: int) -> str:
        body = {"model": "m", "messages": [], "response_format": {"type": text(size)}}
        try:
            msgspec.json.decode(json.dumps(body), type=ChatBody)
        except msgspec.ValidationError as error:
            return invalid_type(ChatBody, str(error)).message
        return ""

    return refuse


def searching_gbnf(text: Callable[[int], str]) -> Callable[[int], object]:
    return lambda size: GBNF_DEFINITION.search(text(size))


def said(number: int) -> list[Message]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}], f"field_{each}": 1} for each in range(number)]


def called(number: int) -> list[Message]:
    calls = [{"id": f"c{each}", "function": {"name": "f", "arguments": "{}"}} for each in range(number)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def answered(number: int) -> list[Message]:
    call = {"type": "function_call", "id": "c", "call_id": "c"}
    return [call, *({"type": "function_call_output", "id": f"o{each}", "call_id": "c"} for each in range(number))]
