"""`Dialect`: the notation of calls and reasoning of a server's model, and the abilities of its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from oaiserve.routes.dialects.declared import declared_calls, declared_reasoning
from oaiserve.routes.dialects.families import CallFamily, family_of
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
