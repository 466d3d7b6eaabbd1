"""`CallFamily`: how a family of models writes tool calls, in prompts and where a grammar forces them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.lark import NUMBER, lark_of

MOST_IN_TWO_FORMS = 256  # Up to this many tools, calls may be in JSON as well as in the family's own form.
MOST_FORCED_CALLS = 16  # The limit stops a model that would never stop calling.
Message = dict[str, Any]


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
    object_start: str = '{"name": "'  # start of a call that is one object, up to its name
    signs: tuple[str, ...] = ()  # A chat template with all of these belongs to this family.
    rank: int = 0  # higher if other families' templates have these signs, too
    # Writes the calls of a history, if they differ from forced ones.
    in_text: Callable[[Iterable[tuple[str, str]]], str] | None = None
    # Converts messages to the form that its templates expect.
    history: Callable[[Sequence[Message]], list[Message]] | None = None
    reasoning_tags: tuple[str, str] | None = None  # set if they differ from those in the template
    reasons_always: bool = False  # The model reasons even before forced calls and answers.
    by_channels: bool = False  # The parser reads reasoning; an answer ends with its first call.
    is_forcible: bool = True  # Grammars can enforce its calls.
    answer_opening: str = ""  # text before an answer that is not a call and follows reasoning

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return the text of calls (names and JSON texts of arguments) in the dialect of this family."""
        texts = []
        for number, (name, arguments) in enumerate(calls):
            head, tail = self._around(name)
            before = (self.opening + head).replace(NUMBER, str(number))
            texts.append(f"{before}{arguments}{tail}{self.closing}")
        return self.before + self.separator.join(texts) + self.after

    def grammar(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        only_one: bool,
        special_ids: Mapping[str, int],
        answer: str | None = None,
        strict: Collection[str] = (),
    ) -> str:
        """Return the text of a grammar (`lark_with_schemas`) for one call of these tools, or for several.

        The schemas are those of the arguments. Special tokens are text to the parsers, but a grammar needs their ids.
        If `answer` has the JSON text of a schema, an instance of it may replace the calls. Schemas of tools that aren't
        `strict` are enforced as far as possible.
        """

        def lark(*texts: str) -> str:
            return " ".join(text if text.startswith("@") else lark_of(text, special_ids) for text in texts if text)

        def drawn(text: str) -> str:
            """Return text whose tag, unless it is a special token, isn't forced: models that don't know it as a token
            write it in pieces, and confuse calls after the token."""
            tag = text.lstrip()
            if not tag.startswith("<") or any(map(tag.startswith, special_ids)):
                return lark(text)
            return f"/[ \\n]{{0,2}}/ {lark(tag)}"

        all_schemas = dict(schemas)
        form = self.parser.form
        bodies = []
        for number, (name, schema) in enumerate(schemas.items()):
            if form is None:
                body = None
            else:
                body = form.body(name, schema, all_schemas, special_ids)
            if body is None or len(schemas) <= MOST_IN_TWO_FORMS:
                head, tail = self._around(name)
                bodies.append(lark(head, f"@schema_{number}", tail))
            else:
                all_schemas[name] = {}
            if body:
                bodies.append(body)
        is_single = only_one or self.by_channels
        if is_single:
            more = ""
        else:
            more = f"({lark(self.separator)} call){{0,{MOST_FORCED_CALLS - 1}}}"
        start = f"{drawn(self.before)} call {more} {drawn(self.after)}"
        if answer is not None:
            start = f"{lark(self.answer_opening, '@answer')} | {start}"
        rules = f"start: {start}\ncall: {drawn(self.opening)} body {drawn(self.closing)}\nbody: {' | '.join(bodies)}"
        lenient = [key for key in all_schemas if key.partition("/")[0] not in strict]
        if "TEXT" in rules and form is not None:
            rules += f"\n{form.terminals(special_ids)}"
        return msgspec.json.encode(
            {"lark": rules, "schemas": all_schemas, "answer": answer, "lenient": lenient}
        ).decode()

    def strict_grammar(
        self, schemas: Mapping[str, Mapping[str, Any]], special_ids: Mapping[str, int]
    ) -> tuple[tuple[str, ...], str]:
        """Return the leads of the parser's sites, and the grammar of the text after them in calls of these tools. The
        grammar begins with a letter that stands for the lead."""
        all_schemas: dict[str, Any] = dict(schemas)
        as_json = {name: f"@schema_{number}" for number, name in enumerate(schemas)}
        tags = (*self.parser.tags, *self.parser.hidden_tags)
        starts = []
        rules = []
        for number, site in enumerate(self.parser.sites):
            arguments = as_json
            if site.is_own_form:
                own = {
                    name: self.parser.own_arguments(name, schema, all_schemas, special_ids)
                    for name, schema in schemas.items()
                }
                arguments = {name: as_json[name] if rule is None else rule for name, rule in own.items()}
            starts.append(f'"{chr(ord("A") + number)}" site_{number}')
            rules.append(site.rules(number, arguments, special_ids, tags))
        text = "\n".join([f"start: {' | '.join(starts)}", *rules])
        if "TEXT" in text and self.parser.form is not None:
            text += f"\n{self.parser.form.terminals(special_ids)}"
        grammar = msgspec.json.encode({"lark": text, "schemas": all_schemas})
        return tuple(site.lead for site in self.parser.sites), grammar.decode()

    def _around(self, name: str) -> tuple[str, str]:
        if not self.arguments_key:
            return name + self.name_end.replace("{name}", name), ""
        return f'{self.object_start}{name}", "{self.arguments_key}": ', "}"
