"""`Dialect`: the notation of calls and reasoning of a server's model, and the abilities of its chat template.

Each family of models has a parser of calls, a text for them in prompts, and a grammar. With the flag "auto", the
tokenizer's `response_template`, as transformers defines it, decides the dialect. Its plain tags and calls in JSON are
supported. A pattern, or a format that can be read only as a whole, cannot be streamed: then the chat template decides.
If it has the signs of no family, transformers' own parser reads the declared calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from oaiserve.config import OptionError
from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.engine.text.response_template import CALLS, BadResponseTemplate, response_form
from oaiserve.engine.text.template_abilities import Abilities
from oaiserve.routes.dialects.declared import REASONING_FIELDS, family_of_template
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.hermes import HERMES, HermesCalls
from oaiserve.routes.dialects.reasoning import THINK, ReasoningDialect

log = logging.getLogger(__name__)
# The families of each plug-in, in the order in which plug-ins were loaded
Families: TypeAlias = "Sequence[Sequence[CallFamily]]"

# Tags around reasoning. The first row whose closing tag is in the chat template applies.
_REASONING_TAGS = (
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    THINK,
)


def family_of(name: str, template: str, plugins: Families = ()) -> CallFamily | None:
    """Return the family of `--tool-call-parser`; with "auto" the chat template's, or else Hermes.

    `plugins` has the families of each plug-in.
    """
    recognised = _recognised(template, plugins)
    if name == "auto":
        return recognised[0] if recognised else HERMES
    if name == "none":
        return None
    known = (family for families in _with_hermes(plugins) for family in reversed(families))
    return next(family for family in (*recognised, *known) if family.name == name)


def check_name(name: str, plugins: Families = ()) -> None:
    """Raise OptionError unless `--tool-call-parser` accepts this value, given the families of these plug-ins."""
    known = sorted({family.name for families in _with_hermes(plugins) for family in families})
    names = ("auto", "none", *known)
    if name not in names:
        raise OptionError(f"--tool-call-parser is '{name}', but must be one of {', '.join(names)}.")


def _recognised(template: str, plugins: Families) -> list[CallFamily]:
    """Return the families that a chat template may belong to, the likeliest first."""
    known = sorted((one for families in _with_hermes(plugins) for one in families), key=lambda one: one.rank)
    return [family for family in known if all(sign in template for sign in family.signs)]


def _with_hermes(plugins: Families) -> list[Sequence[CallFamily]]:
    """Return all families, with those of the plug-in that was loaded last at the front. oaiserve's own were loaded
    first."""
    return [*reversed(plugins), (HERMES,)]


@dataclass(frozen=True, slots=True)
class Dialect:
    calls: CallFamily | None = None  # None: the server does not look for calls
    reasoning: ReasoningDialect | None = None
    abilities: Abilities = field(default_factory=Abilities)  # abilities of the chat template
    # Ids of the tokens that the tokenizer skips in answers.
    special_ids: Mapping[str, int] = field(default_factory=dict)

    def visible_ids(self, *, calls: bool, reasoning: bool) -> frozenset[int]:
        """Return the ids of the special tokens in the tags of calls and reasoning, which must not be skipped in an
        answer."""
        tags: list[str] = []
        if self.calls is not None:
            tags += self.calls.parser.hidden_tags
            if calls or (reasoning and self.calls.by_channels):
                tags += self.calls.parser.tags
        if reasoning and self.reasoning is not None:
            tags += self.reasoning.tags
        text = "\0".join(tags)  # A tag may have several special tokens.
        return frozenset(token_id for token, token_id in self.special_ids.items() if token in text)


def dialect_of(
    tool_call_parser: str,
    reasoning_parser: str,
    template: ChatTemplate | None,
    special_ids: Mapping[str, int],
    families: Callable[[], Families] = tuple,
    response_template: Mapping[str, Any] | None = None,
) -> Dialect:
    """Return the dialect that the flags name, or else that of the tokenizer's declaration or the chat template.

    `families` returns the families of plug-ins, and is called only if calls are read. A `response_template` from the
    operator replaces the tokenizer's, and takes precedence over the chat template.
    """
    if template is None:  # Without a template, there is no chat.
        return Dialect()
    source = template.source
    declared = template.response_template if response_template is None else response_template
    calls = declared_calls(declared) if tool_call_parser == "auto" else None
    fields = REASONING_FIELDS if reasoning_parser == "auto" else ()
    tags = next(filter(None, (_tags(_declared(declared, name)) for name in fields)), None)
    if calls is None and tool_call_parser != "none":
        plugins = families()
        calls = family_of(tool_call_parser, source, plugins)
        if tool_call_parser == "auto" and (response_template is not None or not _recognised(source, plugins)):
            # Reasoning between plain tags is read before the calls.
            keeps_tags = reasoning_parser == "none"
            without = [name for name in REASONING_FIELDS if keeps_tags or _tags(_declared(declared, name))]
            calls = _template_calls(declared, without) or calls
    is_always = calls is not None and (calls.by_channels or calls.reasons_always)
    if calls is not None:
        tags = calls.reasoning_tags or tags
    if tags is None:
        known = (each for each in _REASONING_TAGS if each[1] in source)
        tags = next(known, None if reasoning_parser == "auto" else THINK)
    reasoning = None
    if tags is not None and reasoning_parser != "none":
        reasoning = ReasoningDialect(reasoning_parser, source, template.generation_prompt, tags, is_always=is_always)
    return Dialect(
        calls,
        reasoning,
        abilities=template.abilities,
        special_ids=special_ids,
    )


def declared_calls(response_template: Mapping[str, Any]) -> CallFamily | None:
    """Return the declared dialect of calls, if it is supported."""
    declared = _declared(response_template, "tool_calls")
    call_tags = _tags(declared)
    if call_tags is None or declared.get("content") != "json" or declared.get("content_args"):
        return None

    opening, closing = call_tags

    class DeclaredCalls(HermesCalls):
        opening_tags = (opening,)
        closing_tags = (closing,)
        tags = (opening, closing)

    return CallFamily("declared", DeclaredCalls, f"{opening}\n", f"\n{closing}", "\n")


def _template_calls(response_template: Mapping[str, Any], without: Iterable[str]) -> CallFamily | None:
    """Return a family whose declared calls transformers reads, or None if the declaration cannot be used."""
    if not _declared(response_template, CALLS):
        return None
    try:
        return family_of_template(response_form(response_template, frozenset(without)))
    except BadResponseTemplate as error:
        log.warning("The model's response template is not used for its calls. %s.", error)
        return None


def _declared(response_template: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    fields = response_template.get("fields")
    field = fields.get(name) if isinstance(fields, Mapping) else None
    if isinstance(field, Mapping):
        return field
    return {}


def _tags(declared: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the tags around a field, without white space at their ends."""
    opening = declared.get("open")
    closing = declared.get("close")
    if not (isinstance(opening, str) and isinstance(closing, str) and opening.strip() and closing.strip()):
        return None
    return opening.strip(), closing.strip()
