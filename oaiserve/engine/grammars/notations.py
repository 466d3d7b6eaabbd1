"""The notations of clients' grammars, each translated into llguidance's.

It must not know llguidance's code, tokens or requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from oaiserve.engine.grammars import gbnf, regexes
from oaiserve.engine.grammars.json_schema.prepare import PreparedSchema, prepare, prepare_leniently
from oaiserve.engine.grammars.refusal import Refused
from oaiserve.engine.request import GrammarKind

MOST_CHARACTERS = 2**16  # characters of a grammar, and of choices
MOST_CHOICES = 10_000
MOST_DEFINITIONS = 500  # definitions in a Lark grammar and its schemas
# Strings, regexes and comments. An unclosed string matches as well, because otherwise each quote in it would be tried.
_LARK_TEXTS = re.compile(
    r'"(?:\\.|[^"\\\n])*+(?:"|(?P<string>))|/(?![/*])(?:\\.|[^/\\\n])++(?:/|(?P<regex>))|//[^\n]*|#[^\n]*'
)
_LARK_DEFINITION = re.compile(r"^[ \t]*[?!]?[A-Za-z_][^:\n]*:", re.MULTILINE)
_LARK_TEXT_OR_SCHEMA = re.compile(rf"{_LARK_TEXTS.pattern}|(?P<schema>%json\s*)(?=\{{)")
# Tokens by name or number; other grammars by name; options of llguidance and of rules that don't concern text;
# operators that Lark does not have.
_LARK_REFUSED = re.compile(r"<[^<>\n]*>|@\w+|%(?!(?:import|ignore|regex|lark)\b)\w+|\btemperature\s*=|&|~(?!\s*\d)")
_decoder = json.JSONDecoder()
_LARK_OPTIONS = re.compile(r"\s*%llguidance[ \t]*([^\n]*)")
# The spelling of JSON: one for each string, so that no property can come twice, and a blank after each separator, as
# Python writes it. Real models expect the blank. Tokens such as ` [` begin with it, so without it, models end a list
# before its first item.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_KEYS_WITHOUT_NAMES = {"type", "additionalProperties", "$defs"}
# Objects without listed names may have white space as models lay them out, too. Where a model that begins with a line
# break must go on with a name, it invents odd ones, such as "/code" for "code".
_LAYOUT_OPTIONS = {
    **_JSON_OPTIONS,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r" |\n[ \t]{0,40}",  # limited, because models can write blanks for ever
}


@dataclass(frozen=True, slots=True)
class Translated:
    text: str
    subschemas: Iterable[tuple[str, str]] = ()  # (place, grammar) pairs, innermost first


def translate(kind: GrammarKind, text: str) -> Translated:
    """Return the grammar as llguidance reads it. Raises Refused."""
    match kind:
        case "json_object":
            return Translated(_schema_grammar({"type": "object"}))
        case "json_schema":
            prepared = prepare(text)
            return Translated(_schema_grammar(prepared.document), _subschemas(prepared))
        case "regex":
            return _lark_grammar(f"start: /{regexes.full_match(text).text}/")
        case "choice":
            choices = json.loads(text)
            if len(choices) > MOST_CHOICES or sum(map(len, choices)) > MOST_CHARACTERS:
                raise Refused(f"there may be at most {MOST_CHOICES} choices, with {MOST_CHARACTERS} characters in all")
            return _lark_grammar(f"start: /{'|'.join(map(regexes.literal, choices))}/")
        case "lark" | "gbnf" if len(text) > MOST_CHARACTERS:
            raise Refused(f"the grammar has more than {MOST_CHARACTERS} characters")
        case "lark":
            return _client_lark(text)
        case "gbnf":
            return _lark_grammar(gbnf.as_lark(text))
        case "lark_with_schemas":
            return _lark_with_schemas(**json.loads(text))


def with_prefix(text: str, prefix: str) -> str:
    """Return a translated grammar after a prefix in Lark."""
    first, *more = json.loads(text)["grammars"]
    return json.dumps(
        {"grammars": [_unforced(f"start: {prefix} @constrained"), {**first, "name": "constrained"}, *more]}
    )


def _schema_grammar(document: dict[str, Any]) -> str:
    return json.dumps({"grammars": [_json(document)]})


def _json(document: dict[str, Any], separators: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return a prepared schema as a grammar. The separators replace those of all schemas."""
    options = {**_JSON_OPTIONS, **separators} if separators else _options(document)
    return {"json_schema": {**document, "x-guidance": options}}


def _options(document: dict[str, Any]) -> dict[str, Any]:
    if document.get("type") == "object" and document.keys() <= _KEYS_WITHOUT_NAMES:
        return _LAYOUT_OPTIONS
    return _JSON_OPTIONS


def _subschemas(schema: PreparedSchema) -> Iterator[tuple[str, str]]:
    return ((_schema_grammar(document), place) for document, place in schema.subschemas())


def _lark_grammar(lark: str) -> Translated:
    return Translated(json.dumps({"grammars": [_unforced(lark)]}))


def _unforced(lark: str) -> dict[str, str]:
    # Forcing text means looking ahead, perhaps very far. A model draws the only allowed token without it.
    return {"lark_grammar": f'{lark}\n%llguidance {{"no_forcing": true}}'}


def _lark_with_schemas(
    lark: str, schemas: dict[str, Any], answer: str | None = None, lenient: Sequence[str] = ()
) -> Translated:
    """Translate one of the server's own grammars. Only the schemas in it come from a client. Those in `lenient` are
    obeyed as far as possible."""
    # Its texts are short, and forcing them yields the tokens of the chat template. Drawn one by one, they differ.
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    parts = []
    for number, (name, schema) in enumerate(schemas.items()):
        part = _schema_part(number, schema, f"in the parameters of '{name}'", {}, name in lenient)
        grammars.append(part)
        parts.append((part, f"the parameters of '{name}'"))
    if answer is None:
        alone = ((json.dumps({"grammars": [part]}), place) for part, place in parts)
        return Translated(json.dumps({"grammars": grammars}), alone)
    prepared = prepare(answer)
    grammars.append({"name": "answer", **_json(prepared.document)})
    return Translated(json.dumps({"grammars": grammars}), _subschemas(prepared))


def _schema_part(
    number: int, schema: Any, place: str, separators: dict[str, Any], is_lenient: bool = False
) -> dict[str, Any]:
    """Return a schema as a part of a grammar, which calls it `@schema_` with the number. Raises Refused."""
    text = json.dumps(schema)
    try:
        if is_lenient:
            document = prepare_leniently(text)[0].document
        else:
            document = prepare(text).document
    except Refused as refused:
        raise Refused(f"{refused.reason}, {place}") from None
    return {"name": f"schema_{number}", **_json(document, separators)}


def _client_lark(text: str) -> Translated:
    """Translate a grammar, without its first line of options. Raises Refused for rules about anything other than text,
    and too long a compilation."""
    if options := _LARK_OPTIONS.match(text):
        try:
            config: Any = json.loads(options[1])
        except ValueError:
            config = None
        if not isinstance(config, dict) or not config.keys() <= {"no_forcing"}:  # This option changes no answer.
            raise Refused(f"the grammar has the options {options[1][:40]!r}, which are not supported")
        text = text[options.end() :]
    pieces, schemas = _without_schemas(text)
    bare = _LARK_TEXTS.sub('""', '""'.join(pieces))  # the text outside of strings, regexes and comments
    if match := _LARK_REFUSED.search(bare):
        raise Refused(f"the grammar has {match[0].strip()[:40]!r}, which is not supported")
    if len(_LARK_DEFINITION.findall(bare)) + len(schemas) > MOST_DEFINITIONS:
        raise Refused(f"the grammar has more than {MOST_DEFINITIONS} definitions")
    lark = pieces[0] + "".join(f"@schema_{number}{piece}" for number, piece in enumerate(pieces[1:]))
    return Translated(json.dumps({"grammars": [_unforced(lark), *schemas]}))


def _without_schemas(text: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the pieces of a Lark grammar between its JSON Schemas, and the schemas as grammars of their own."""
    pieces: list[str] = []
    schemas: list[dict[str, Any]] = []
    begin = end = 0
    while match := _LARK_TEXT_OR_SCHEMA.search(text, end):
        end = match.end()
        if match.lastgroup in ("string", "regex"):
            raise Refused(f"the grammar has a {match.lastgroup} without an end in its line: {match[0][:40]!r}")
        if match["schema"] is None:
            continue
        pieces.append(text[begin : match.start()])
        try:
            schema, begin = _decoder.raw_decode(text, end)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the grammar has a '%json' that cannot be read: {error}") from None
        end = begin
        # Clients of llguidance pass its options with a schema. Only the spelling of JSON can be obeyed.
        options = schema.pop("x-guidance", None)
        separators = {
            name: options[name]
            for name in ("item_separator", "key_separator")
            if isinstance(options, dict) and name in options
        }
        schemas.append(_schema_part(len(schemas), schema, "in the grammar's '%json'", separators))
    return [*pieces, text[begin:]], schemas
