"""The notations of clients' grammars, each translated into llguidance's.

It must not know llguidance's code, tokens or requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from oaiserve.engine.grammars import gbnf, regexes
from oaiserve.engine.grammars.json_schema.prepare import PreparedSchema, prepare
from oaiserve.engine.grammars.refusal import Refused
from oaiserve.engine.request import GrammarKind

MOST_CHARACTERS = 2**16  # of a grammar, and of choices
MOST_CHOICES = 10_000
MOST_DEFINITIONS = 500  # of a Lark grammar
_LARK_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_LARK_DEFINITION = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w-]*.*?:", re.MULTILINE)
# Tokens by name or number; other grammars; options of llguidance; options of rules that act on tokens; operators that
# Lark does not have.
_LARK_REFUSED = re.compile(
    r"<[^>\n]*>|@\w+|%(?!import\b|ignore\b)\w+|\b(?:stop|max_tokens|temperature)\s*=|&|~(?!\s*\d)"
)
_LARK_OPTIONS = re.compile(r"\s*%llguidance[ \t]*([^\n]*)")
# How JSON is written: nothing between tokens, and one spelling for each string, so that no property can come twice.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
# Within a grammar JSON has a blank after each separator: so chat templates write calls, and models expect it.
_SPACED_OPTIONS = {**_JSON_OPTIONS, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Translated:
    text: str
    subschemas: Iterable[tuple[str, str]] = ()  # as grammars of their own, with their places, the innermost ones first


def translate(kind: GrammarKind, text: str) -> Translated:
    """Return the grammar as llguidance reads it. Raises Refused."""
    match kind:
        case "json_object":
            return Translated(_schema_grammar({"type": "object"}))
        case "json_schema":
            prepared = prepare(text)
            return Translated(_schema_grammar(prepared.document), _subschemas(prepared))
        case "regex":
            try:
                regex = regexes.full_match(text).text
            except Refused as refused:
                raise Refused(f"the regex {refused.reason}") from None
            return _lark_grammar(f"start: /{regex}/")
        case "choice":
            choices = json.loads(text)
            if len(choices) > MOST_CHOICES or sum(map(len, choices)) > MOST_CHARACTERS:
                raise Refused(f"there may be at most {MOST_CHOICES} choices, with {MOST_CHARACTERS} characters in all")
            return _lark_grammar(f"start: /{'|'.join(map(regexes.literal, choices))}/")
        case "lark" | "gbnf" if len(text) > MOST_CHARACTERS:
            raise Refused(f"the grammar has more than {MOST_CHARACTERS} characters")
        case "lark":
            return _lark_grammar(_checked_lark(text))
        case "gbnf":
            return _lark_grammar(gbnf.as_lark(text))
        case "lark_with_schemas":
            return _lark_with_schemas(**json.loads(text))


def with_prefix(text: str, prefix: str) -> str:
    """Return a translated grammar behind a prefix in Lark."""
    first, *more = json.loads(text)["grammars"]
    return json.dumps(
        {"grammars": [_unforced(f"start: {prefix} @constrained"), {**first, "name": "constrained"}, *more]}
    )


def _schema_grammar(document: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": {**document, "x-guidance": _JSON_OPTIONS}}]})


def _subschemas(schema: PreparedSchema) -> Iterator[tuple[str, str]]:
    return ((_schema_grammar(document), place) for document, place in schema.subschemas())


def _lark_grammar(lark: str) -> Translated:
    return Translated(json.dumps({"grammars": [_unforced(lark)]}))


def _unforced(lark: str) -> dict[str, str]:
    # To force text means to look ahead, maybe very far. A model takes the only token that it can without that.
    return {"lark_grammar": f'{lark}\n%llguidance {{"no_forcing": true}}'}


def _lark_with_schemas(lark: str, schemas: dict[str, Any], answer: str | None = None) -> Translated:
    """Translate a grammar of the server's own. Only the schemas in it come from a client."""
    grammars: list[dict[str, Any]] = [_unforced(lark)]
    for number, (name, schema) in enumerate(schemas.items()):
        try:
            prepared = prepare(json.dumps(schema))
        except Refused as refused:
            raise Refused(f"{refused.reason}, in the parameters of '{name}'") from None
        document = {**prepared.document, "x-guidance": _SPACED_OPTIONS}
        grammars.append({"name": f"schema_{number}", "json_schema": document})
    if answer is None:
        return Translated(json.dumps({"grammars": grammars}))
    prepared = prepare(answer)
    grammars.append({"name": "answer", "json_schema": {**prepared.document, "x-guidance": _JSON_OPTIONS}})
    return Translated(json.dumps({"grammars": grammars}), _subschemas(prepared))


def _checked_lark(text: str) -> str:
    """Return a grammar without its first line of options. Raises Refused for rules about anything other than text, and
    too long a compilation."""
    if options := _LARK_OPTIONS.match(text):
        try:
            given: Any = json.loads(options[1])
        except ValueError:
            given = None
        if not isinstance(given, dict) or not given.keys() <= {"no_forcing"}:  # it changes no answer
            raise Refused(f"the grammar has the options {options[1][:40]!r}, which are not supported")
        text = text[options.end() :]
    bare = _LARK_TEXTS.sub('""', text)  # the text outside of strings, regexes and comments
    if found := _LARK_REFUSED.search(bare):
        raise Refused(f"the grammar has {found[0].strip()[:40]!r}, which is not supported")
    if len(_LARK_DEFINITION.findall(bare)) > MOST_DEFINITIONS:
        raise Refused(f"the grammar has more than {MOST_DEFINITIONS} definitions")
    return text
