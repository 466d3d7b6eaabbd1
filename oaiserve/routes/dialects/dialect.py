"""`Dialect`: the notation of calls and reasoning of a server's model, and the abilities of its chat template.

A family of models has a parser of calls, their text in prompts, and their grammar. By the flag "auto", a tokenizer's
`response_template`, as transformers defines it, says the dialect. Of it, plain text as tags and calls in JSON are
supported. A pattern, or a format that can be read only as a whole, cannot be streamed: then the chat template decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.json_calls import HermesCalls, LlamaCalls, MistralCalls
from oaiserve.routes.dialects.qwen_coder import QwenCoderCalls
from oaiserve.routes.dialects.reasoning import THINK, ReasoningDialect

MOST_FORCED_CALLS = 16  # so that a model without an end does not call for ever


@dataclass(frozen=True, slots=True)
class CallFamily:
    """A family of models. It writes `before`, then each call between `opening` and `closing`, then `after`."""

    name: str
    parser: type[CallParser]
    opening: str = ""
    closing: str = ""
    separator: str = ""
    before: str = ""
    after: str = ""
    arguments_key: str = "arguments"  # "": a call is its name, `name_end` and the arguments, not one object
    name_end: str = ""
    short_ids: bool = False  # the templates refuse ids of calls that have not exactly nine letters or digits

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return the text of calls (names and JSON texts of arguments) in the dialect of this family."""
        texts = []
        for name, arguments in calls:
            head, tail = self._around(name)
            texts.append(f"{self.opening}{head}{arguments}{tail}{self.closing}")
        return self.before + self.separator.join(texts) + self.after

    def grammar(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        only_one: bool,
        special_ids: Mapping[str, int],
        answer: str | None = None,
    ) -> str:
        """Return the text of a grammar (`lark_with_schemas`) for one call of these tools, or for several.

        The schemas are those of the arguments. Special tokens are text to the parsers, but a grammar needs their ids.
        With the JSON text of a schema as `answer`, an instance of it may come instead of the calls.
        """

        def lark(text: str) -> str:
            tags = [tag for tag in special_ids if tag in text]
            pieces = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
            return " ".join(
                f"<[{special_ids[piece]}]>" if piece in special_ids else msgspec.json.encode(piece).decode()
                for piece in pieces
                if piece
            )

        bodies = []
        for number, name in enumerate(schemas):
            head, tail = self._around(name)
            bodies.append(" ".join(filter(None, (lark(head), f"@schema_{number}", lark(tail)))))
        more = "" if only_one else f"({lark(self.separator)} call){{0,{MOST_FORCED_CALLS - 1}}}"
        start = " ".join(filter(None, (lark(self.before), "call", more, lark(self.after))))
        if answer is not None:
            start = f"@answer | {start}"
        call = " ".join(filter(None, (lark(self.opening), "body", lark(self.closing))))
        rules = f"start: {start}\ncall: {call}\nbody: {' | '.join(bodies)}"
        return msgspec.json.encode({"lark": rules, "schemas": schemas, "answer": answer}).decode()

    def _around(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call."""
        if not self.arguments_key:
            return name + self.name_end, ""
        return f'{{"name": "{name}", "{self.arguments_key}": ', "}"


HERMES = CallFamily("hermes", HermesCalls, "<tool_call>\n", "\n</tool_call>", "\n")
LLAMA = CallFamily("llama3_json", LlamaCalls, separator="; ", arguments_key="parameters")
MISTRAL = CallFamily("mistral", MistralCalls, before="[TOOL_CALLS][", separator=", ", after="]", short_ids=True)
MISTRAL_NAMED = CallFamily("mistral", MistralCalls, "[TOOL_CALLS]", arguments_key="", name_end="[ARGS]", short_ids=True)
# Values without quotes cannot follow every schema (patterns, lengths), so forced calls have the JSON form.
QWEN_CODER = CallFamily("qwen3_coder", QwenCoderCalls, "<tool_call>\n", "\n</tool_call>", "\n")

# A family is recognised by a text in its chat templates, in this order.
_SIGNS: Sequence[tuple[str, CallFamily]] = (
    ("[ARGS]", MISTRAL_NAMED),
    ("[TOOL_CALLS]", MISTRAL),
    ("<function=", QWEN_CODER),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA),
)


def family_of(name: str, template: str) -> CallFamily | None:
    """Return the family by `--tool-call-parser`; with "auto" by the chat template, or else Hermes."""
    recognised = [family for sign, family in _SIGNS if sign in template]
    if name == "auto":
        return recognised[0] if recognised else HERMES
    if name == "none":
        return None
    named = {family.name: family for family in (HERMES, LLAMA, MISTRAL, QWEN_CODER)}
    return next((family for family in recognised if family.name == name), named[name])


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
    tool_call_parser: str, reasoning_parser: str, template: ChatTemplate | None, special_ids: Mapping[str, int]
) -> Dialect:
    """Return the dialect by the flags, or else by the tokenizer's declaration or the chat template."""
    if template is None:  # no chat then
        return Dialect()
    source, declared = template.source, template.response_template
    calls = declared_calls(declared) if tool_call_parser == "auto" else None
    fields = _REASONING_FIELDS if reasoning_parser == "auto" else ()
    tags = next(filter(None, (_tags(_declared(declared, name)) for name in fields)), None)
    if tags is None and (THINK[1] in source or reasoning_parser != "auto"):
        tags = THINK
    reasoning = None
    if tags is not None and reasoning_parser != "none":
        reasoning = ReasoningDialect(reasoning_parser, source, template.generation_prompt, tags)
    return Dialect(
        calls or family_of(tool_call_parser, source),
        reasoning,
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

    opening, closing = found

    class DeclaredCalls(HermesCalls):
        opening_tags = (opening,)
        tags = (opening, closing)

    return CallFamily("declared", DeclaredCalls, f"{opening}\n", f"\n{closing}", "\n")


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
