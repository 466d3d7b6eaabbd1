"""The forms in which clients write grammars, each turned into the one form that llguidance reads.

It must not know llguidance's code, tokens or requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oaiserve.engine import json_schema, regexes
from oaiserve.engine.refusal import Refused
from oaiserve.engine.request import GrammarKind

MOST_CHARACTERS = 2**16  # of a grammar, and of choices
MOST_CHOICES = 10_000
# How JSON is written: nothing between tokens, and one spelling for each string, so that no property can come twice.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class Translated:
    """A grammar as llguidance reads it."""

    text: str
    schema: json_schema.Prepared | None = None

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yield the parts of a schema as grammars of their own, each with its place, the innermost ones first."""
        if self.schema is not None:
            for document, place in self.schema.parts():
                yield _schema_grammar(document), place


def translate(kind: GrammarKind, text: str) -> Translated:
    """Return the grammar as llguidance reads it. Raises Refused."""
    match kind:
        case "json_object":
            return Translated(_schema_grammar({"type": "object"}))
        case "json_schema":
            prepared = json_schema.prepare(text)
            return Translated(_schema_grammar(prepared.document), prepared)
        case "regex":
            return Translated(_regex_grammar(_full_match(text)))
        case "choice":
            return Translated(_regex_grammar("|".join(map(regexes.literal, _choices(text)))))
        case "lark" | "gbnf":
            raise Refused("not yet")


def _schema_grammar(document: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": {**document, "x-guidance": _JSON_OPTIONS}}]})


def _regex_grammar(regex: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{regex}/"}]})


def _full_match(text: str) -> str:
    try:
        return regexes.full_match(text).text
    except Refused as refused:
        raise Refused(f"the regex {refused.reason}") from None


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if len(choices) > MOST_CHOICES or sum(map(len, choices)) > MOST_CHARACTERS:
        raise Refused(f"there may be at most {MOST_CHOICES} choices, with {MOST_CHARACTERS} characters in all")
    return list(choices)
