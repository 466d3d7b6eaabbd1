"""`AnswerForms`: how the model of a server writes calls and reasoning, and what its chat template knows of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from oaiserve.routes.dialects.declared import declared_calls, declared_reasoning
from oaiserve.routes.dialects.families import CallFamily, family_of
from oaiserve.routes.dialects.reasoning import ReasoningForm, reasoning_form


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
class AnswerForms:
    calls: CallFamily | None = None  # None: calls are not looked for
    reasoning: ReasoningForm | None = None
    template_takes_tools: bool = True
    template_takes_system: bool = True
    special_ids: Mapping[str, int] = field(default_factory=dict)  # of the tokens that the tokenizer skips in answers

    def visible_ids(self, *, calls: bool, reasoning: bool) -> frozenset[int]:
        """Return the special tokens that the parsers of these have to see."""
        marks: list[str] = []
        if calls and self.calls is not None:
            marks += self.calls.parser.marks
        if reasoning and self.reasoning is not None:
            marks += self.reasoning.marks
        return frozenset(self.special_ids[mark] for mark in marks if mark in self.special_ids)


def answer_forms(
    tool_call_parser: str, reasoning_parser: str, template: Template | None, special_ids: Mapping[str, int]
) -> AnswerForms:
    """Return the forms that the flags name, or else those that the tokenizer declares or the chat template shows."""
    if template is None:  # no chat then
        return AnswerForms()
    source, declared = template.source, template.response_template
    calls = declared_calls(declared) if tool_call_parser == "auto" else None
    return AnswerForms(
        calls or family_of(tool_call_parser, source),
        reasoning_form(reasoning_parser, source, template.generation_prompt, declared_reasoning(declared)),
        template_takes_tools=re.search(r"\btools\b", source) is not None,
        template_takes_system=template.takes_system,
        special_ids=special_ids,
    )
