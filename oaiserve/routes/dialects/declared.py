"""Reads the dialect of calls and reasoning in a tokenizer's `response_template`, as transformers defines it.

Only plain text as tags and calls in JSON are supported. A pattern, or a format that can be read only as a whole, cannot
be streamed: then the chat template decides, as if nothing were declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oaiserve.routes.dialects.families import CallFamily
from oaiserve.routes.dialects.hermes import HermesCalls

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def declared_calls(response_template: Mapping[str, Any]) -> CallFamily | None:
    """Return the declared dialect of calls, if it is supported."""
    field = _field(response_template, "tool_calls")
    tags = _tags(field)
    if tags is None or field.get("content") != "json" or field.get("content_args"):
        return None

    opening, closing = tags

    class DeclaredCalls(HermesCalls):
        opening_tags = (opening,)
        tags = (opening, closing)

    return CallFamily("declared", DeclaredCalls, f"{opening}\n", f"\n{closing}", "\n")


def declared_reasoning(response_template: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the declared tags around the reasoning, if they are supported."""
    fields = (_field(response_template, name) for name in _REASONING_FIELDS)
    return next((tags for field in fields if (tags := _tags(field)) is not None), None)


def _field(response_template: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    fields = response_template.get("fields")
    field = fields.get(name) if isinstance(fields, Mapping) else None
    return field if isinstance(field, Mapping) else {}


def _tags(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the tags around a field, without whitespace at their ends."""
    opening, closing = field.get("open"), field.get("close")
    if not (isinstance(opening, str) and isinstance(closing, str) and opening.strip() and closing.strip()):
        return None
    return opening.strip(), closing.strip()
