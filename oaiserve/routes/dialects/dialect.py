"""`Dialect`: the notation of calls and reasoning of a server's model, and the abilities of its chat template.

By the flag "auto", a tokenizer's `response_template`, as transformers defines it, says which. Only plain text as tags
and calls in JSON are supported of it. A pattern, or a format that can be read only as a whole, cannot be streamed: then
the chat template decides, as if nothing were declared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from oaiserve.routes.dialects.families import CallFamily, family_of
from oaiserve.routes.dialects.json_calls import HermesCalls
from oaiserve.routes.dialects.reasoning import ReasoningDialect, reasoning_dialect


class Template(Protocol):
    """The chat template of the model."""

    @property
    def source(self) -> str: ...

    @property
    def response_template(self) -> Mapping[str, Any]: ...

    @property
    def takes_system(self) -> bool: ...

    def generation_prompt(self, template_kwargs: Mapping[str, Any], /) -> str: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    calls: CallFamily | None = None  # None: calls are not looked for
    reasoning: ReasoningDialect | None = None
    template_takes_tools: bool = True
    template_takes_system: bool = True
    special_ids: Mapping[str, int] = field(default_factory=dict)  # of the tokens that the tokenizer skips in answers

    def visible_ids(self, *, calls: bool, reasoning: bool) -> frozenset[int]:
        """Return the ids of the special tokens among the tags of calls and reasoning, by request."""
        tags: list[str] = []
        if calls and self.calls is not None:
            tags += self.calls.parser.tags
        if reasoning and self.reasoning is not None:
            tags += self.reasoning.tags
        return frozenset(self.special_ids[tag] for tag in tags if tag in self.special_ids)


def dialect_of(
    tool_call_parser: str, reasoning_parser: str, template: Template | None, special_ids: Mapping[str, int]
) -> Dialect:
    """Return the dialect by the flags, or else by the tokenizer's declaration or the chat template."""
    if template is None:  # no chat then
        return Dialect()
    source, declared = template.source, template.response_template
    calls = declared_calls(declared) if tool_call_parser == "auto" else None
    return Dialect(
        calls or family_of(tool_call_parser, source),
        reasoning_dialect(reasoning_parser, source, template.generation_prompt, declared_reasoning(declared)),
        template_takes_tools=re.search(r"\btools\b", source) is not None,
        template_takes_system=template.takes_system,
        special_ids=special_ids,
    )


_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def declared_calls(response_template: Mapping[str, Any]) -> CallFamily | None:
    """Return the declared dialect of calls, if it is supported."""
    declared = _declared(response_template, "tool_calls")
    found = _tags(declared)
    if found is None or declared.get("content") != "json" or declared.get("content_args"):
        return None

    class DeclaredCalls(HermesCalls):
        opening_tags = found[:1]
        tags = found

    opening, closing = found
    return CallFamily("declared", DeclaredCalls, f"{opening}\n", f"\n{closing}", "\n")


def declared_reasoning(response_template: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the declared tags around the reasoning, if they are supported."""
    declared = (_declared(response_template, name) for name in _REASONING_FIELDS)
    return next((tags for field in declared if (tags := _tags(field)) is not None), None)


def _declared(response_template: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    fields = response_template.get("fields")
    found = fields.get(name) if isinstance(fields, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _tags(declared: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the tags around a field, without whitespace at their ends."""
    opening, closing = declared.get("open"), declared.get("close")
    if not (isinstance(opening, str) and isinstance(closing, str) and opening.strip() and closing.strip()):
        return None
    return opening.strip(), closing.strip()
