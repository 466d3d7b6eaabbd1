"""Calls of Mistral: `[TOOL_CALLS]` and a list in JSON or, in newer models, the name and the arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import regex

from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import ListedCalls, NamedCalls
from oaiserve.routes.dialects.segments import Segment
from oaiserve.routes.dialects.sites import OBJECT, SPACE, Site


class MistralCalls(ListedCalls, NamedCalls):
    """Reads `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or the newer `[TOOL_CALLS]name[ARGS]{...}`."""

    opening_tags = ("[TOOL_CALLS]",)
    tags = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    sites = (OBJECT, Site(r"\[TOOL_CALLS\]", r"A-Za-z0-9_.\-", (SPACE, "[ARGS]?", SPACE), is_spaced=True))
    named = regex.compile(
        r"\[TOOL_CALLS\]\s*+(?P<name>[A-Za-z0-9_.-]++)(?:\[CALL_ID\][A-Za-z0-9]*+)?\s*+(?:\[ARGS\])?\s*+(?=\{)"
    )

    def _head(self, segments: list[Segment]) -> bool:
        rest = self._text[len(self._tag) :].lstrip()
        if rest[:1] in ("", "[", "{"):
            return ListedCalls._head(self, segments)
        return NamedCalls._head(self, segments)


def with_short_ids(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the ids of calls that the templates expect: nine letters or digits."""

    def short(call_id: str) -> str:
        return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]

    result = []
    for message in messages:
        shortened = dict(message)
        if "tool_call_id" in message:
            shortened["tool_call_id"] = short(message["tool_call_id"])
        if "tool_calls" in message:
            shortened["tool_calls"] = [{**call, "id": short(call.get("id", ""))} for call in message["tool_calls"]]
        result.append(shortened)
    return result


MISTRAL_NAMED = CallFamily(
    "mistral",
    MistralCalls,
    "[TOOL_CALLS]",
    arguments_key="",
    name_end="[ARGS]",
    history=with_short_ids,
    signs=("[ARGS]",),
)
MISTRAL = CallFamily(
    "mistral",
    MistralCalls,
    separator=", ",
    before="[TOOL_CALLS][",
    after="]",
    history=with_short_ids,
    signs=("[TOOL_CALLS]",),
)
