"""Calls of Kimi K2: `functions.name:0` as the id of a call, then its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import regex

from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import NamedCalls
from oaiserve.routes.dialects.lark import NUMBER
from oaiserve.routes.dialects.sites import NAME, SPACE, Site

_SECTION = "<|tool_calls_section_begin|>"
_CALL = "<|tool_call_begin|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_CALL_END = "<|tool_call_end|>"
_SECTION_END = "<|tool_calls_section_end|>"


class KimiCalls(NamedCalls):
    opening_tags = (_SECTION, _CALL)
    closing_tags = (_CALL_END, _SECTION_END)
    tags = (_SECTION, _CALL, _ARGUMENTS, _CALL_END, _SECTION_END)
    named = regex.compile(
        rf"(?:{regex.escape(_SECTION)}\s*)?{regex.escape(_CALL)}\s*(?:functions\.)?(?P<name>[^\s<>{{}}:]++)(?::\d++)?\s*"
        rf"{regex.escape(_ARGUMENTS)}\s*(?=\{{)"
    )
    sites = (
        Site(
            regex.escape(_CALL),
            rf"{NAME}:",
            ("/(:[0-9]{1,4})?[ \\t\\n\\r]{0,20}/", _ARGUMENTS, SPACE),
            prefix=r"functions\.",
            is_spaced=True,
        ),
    )


def with_counted_ids(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have ids as the model writes them, numbered through the conversation."""
    ids: dict[str, str] = {}
    result = []
    for message in messages:
        counted = dict(message)
        if "tool_calls" in message:
            counted["tool_calls"] = []
            for call in message["tool_calls"]:
                counted_id = f"functions.{call['function']['name']}:{len(ids)}"
                ids[call.get("id", counted_id)] = counted_id
                counted["tool_calls"].append({**call, "id": counted_id})
        if "tool_call_id" in message:
            counted["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
        result.append(counted)
    return result


KIMI = CallFamily(
    "kimi_k2",
    KimiCalls,
    f"{_CALL}functions.",
    _CALL_END,
    "",
    _SECTION,
    _SECTION_END,
    arguments_key="",
    name_end=f":{NUMBER}{_ARGUMENTS}",
    history=with_counted_ids,
    signs=(_SECTION,),
)
