"""The notations of clients' grammars, each translated into llguidance's.

This module must not depend on llguidance's code, on tokens or on requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

from oaiserve.engine.grammars import gbnf, regexes
from oaiserve.engine.grammars.json_schema.prepare import PreparedSchema, prepare, prepare_leniently
from oaiserve.engine.grammars.json_schema.reduction import reduced
from oaiserve.engine.grammars.json_schema.rules import as_rules
from oaiserve.engine.grammars.json_schema.terms import kinds_of, with_small_numbers
from oaiserve.engine.grammars.refusal import Refused
from oaiserve.engine.request import GrammarKind

MOST_CHARACTERS = 2**16  # characters of a grammar, and of all choices
MOST_CHOICES = 10_000
MOST_DEFINITIONS = 500  # definitions in a Lark grammar and its schemas
# Strings, regexes and comments. An unclosed string matches as well, because otherwise the regex would try each quote in
# it.
_LARK_TEXTS = re.compile(
    r'"(?:\\.|[^"\\\n])*+(?:"|(?P<string>))|/(?![/*])(?:\\.|[^/\\\n])++(?:/|(?P<regex>))|//[^\n]*|#[^\n]*'
)
_LARK_DEFINITION = re.compile(r"^[ \t]*[?!]?[A-Za-z_][^:\n]*:", re.MULTILINE)
_LARK_TEXT_OR_SCHEMA = re.compile(rf"{_LARK_TEXTS.pattern}|(?P<schema>%json\s*)(?=\{{)")
# Unsupported: tokens by name or number; other grammars by name; options of llguidance and of rules that don't concern
# text; operators that Lark doesn't have.
_LARK_REFUSED = re.compile(r"<[^<>\n]*>|@\w+|%(?!(?:import|ignore|regex|lark)\b)\w+|\btemperature\s*=|&|~(?!\s*\d)")
_decoder = json.JSONDecoder()
_LARK_OPTIONS = re.compile(r"\s*%llguidance[ \t]*([^\n]*)")
# How JSON is spelled: each string in one way, so that no property can come twice, and a blank after each separator, as
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
NO_FORCING = '%llguidance {"no_forcing": true}'
_KEYS_WITHOUT_NAMES = {"type", "additionalProperties", "$defs"}
# Objects without listed names may also have white space as models lay them out. Where names are listed, a model that
# begins with a line break may have to continue with one of them, and then invents odd ones, such as "/code" for "code".
_LAYOUT_OPTIONS = {
    **_JSON_OPTIONS,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r" |\n[ \t]{0,40}",  # limited, because a model may write blanks without end
}


# JSON on several lines, as most models lay it out: lines begin after a comma or between other parts. `LineBreaks`
# removes the breaks that no model means, such as before a colon.
_INDENT = r"\n(?: {0,40}|\t{0,20})"
_LINES = {"item_separator": f",(?: |{_INDENT})", "whitespace_pattern": _INDENT}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Translated:
    text: str
    subschemas: Iterable[tuple[str, str]] = ()  # (place, grammar) pairs, innermost first
    # A grammar that allows everything that `text` allows, and line breaks as well. Empty: the model has no choice of
    # layout.
    in_lines: str = ""
    narrower: Callable[[], Translated] | None = None  # makes a narrower grammar, if llguidance can't compile this one
    may_leave_out: bool = False  # Keywords of a schema may be left out if llguidance can't compile it with them.
    left_out: Sequence[str] = ()  # the omitted keywords; "" stands for a whole schema


ErrorOf = Callable[[str], str]  # takes a grammar, and returns llguidance's error, or ""


def translate(
    kind: GrammarKind,
    text: str,
    *,
    in_one_line: bool = False,
    is_lenient: bool = False,
    error_of: ErrorOf | None = None,
) -> Translated:
    """Return the grammar as llguidance reads it. Raises Refused. With `error_of`, lenient schemas lose keywords that
    llguidance cannot obey in combination."""
    match kind:
        case "json_object":
            return Translated(_schema_grammar({"type": "object"}, in_one_line=in_one_line))
        case "json_schema":
            left_out: dict[str, None] = {}
            prepared = _lenient(text, error_of, left_out, is_open=True) if is_lenient else prepare(text)
            translated = _translated_schema(prepared, in_one_line=in_one_line, is_lenient=is_lenient)
            return replace(translated, may_leave_out=is_lenient, left_out=[*left_out])
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
            return _lark_with_schemas(
                **json.loads(text), in_one_line=in_one_line, answer_is_lenient=is_lenient, error_of=error_of
            )


def _lenient(
    text: str, error_of: ErrorOf | None, left_out: dict[str, None], *, is_open: bool = False
) -> PreparedSchema:
    """Prepare a schema without keywords that can't be obeyed. Those that only llguidance rejects are added to
    `left_out`."""
    prepared, _ = prepare_leniently(text, is_open=is_open)
    if error_of is None:
        return prepared
    prepared, keywords = reduced(prepared, text, lambda document: error_of(_tried(document)))
    left_out.update(dict.fromkeys(keywords))
    return prepared


def _translated_schema(schema: PreparedSchema, *, in_one_line: bool, is_lenient: bool) -> Translated:
    has_layout = not in_one_line and _options(schema.document) is _JSON_OPTIONS
    if has_layout and kinds_of(schema.document) & {"object", "array"}:
        in_lines = json.dumps({"grammars": _schema_grammars(schema, _LINES, is_lenient=is_lenient)})
    else:
        in_lines = ""
    options = _layout(in_one_line=in_one_line)
    text = json.dumps({"grammars": _schema_grammars(schema, options, is_lenient=is_lenient)})
    narrower = partial(_translated_schema, schema, in_one_line=in_one_line, is_lenient=False)
    return Translated(text, _subschemas(schema), in_lines, narrower if is_lenient else None)


def _schema_grammars(
    schema: PreparedSchema, options: Mapping[str, Any], name: str = "", *, is_lenient: bool = False
) -> list[dict[str, Any]]:
    """Return the grammars of a schema. The first one gets the name. Raises Refused."""
    grammars: list[dict[str, Any]] = []
    if is_lenient or schema.has_large_numbers:
        all_options = {**_JSON_OPTIONS, **options}
        grammars = as_rules(schema, all_options, f"{name}_part", in_order=not is_lenient)
    first, *others = grammars or [_json(schema.document, options)]
    return [{"name": name, **first} if name else first, *others]


def with_prefix(text: str, prefix: str) -> str:
    """Return a translated grammar after a prefix in Lark."""
    first, *more = json.loads(text)["grammars"]
    return json.dumps(
        {"grammars": [_unforced(f"start: {prefix} @constrained"), {**first, "name": "constrained"}, *more]}
    )


def _schema_grammar(document: dict[str, Any], *, in_one_line: bool = False) -> str:
    return json.dumps({"grammars": [_json(document, _layout(in_one_line=in_one_line))]})


def _layout(*, in_one_line: bool) -> Mapping[str, Any]:
    return _JSON_OPTIONS if in_one_line else _NOTHING


def _json(document: dict[str, Any], options: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
    """Return a prepared schema as a grammar. The options replace those of all schemas."""
    options = {**_JSON_OPTIONS, **options} if options else _options(document)
    return {"json_schema": {**document, "x-guidance": options}}


def _options(document: dict[str, Any]) -> dict[str, Any]:
    if document.get("type") == "object" and document.keys() <= _KEYS_WITHOUT_NAMES:
        return _LAYOUT_OPTIONS
    return _JSON_OPTIONS


def _subschemas(schema: PreparedSchema) -> Iterator[tuple[str, str]]:
    return ((_tried(document), place) for document, place in schema.subschemas())


def _tried(document: dict[str, Any]) -> str:
    """Return a schema as a grammar that only serves to test whether it compiles. Large numbers are replaced by smaller
    ones, because llguidance crashes on some of them, such as -2^63."""
    return _schema_grammar(with_small_numbers(document))


def _lark_grammar(lark: str) -> Translated:
    return Translated(json.dumps({"grammars": [_unforced(lark)]}))


def _unforced(lark: str) -> dict[str, str]:
    # Forcing text means looking ahead, perhaps very far. Without it, the model draws the only allowed token itself.
    return {"lark_grammar": f"{lark}\n{NO_FORCING}"}


def _lark_with_schemas(
    lark: str,
    schemas: dict[str, Any],
    answer: str | None = None,
    lenient: Sequence[str] = (),
    *,
    in_one_line: bool = False,
    answer_is_lenient: bool = False,
    error_of: ErrorOf | None = None,
) -> Translated:
    """Translate one of the server's own grammars. Only the schemas in it come from a client. Those in `lenient` are
    obeyed as far as possible."""
    # The texts of the server's own grammar are short, and forcing them yields the same tokens as the chat template.
    # Drawn one by one, the tokens differ.
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    parts = []
    left_out: dict[str, None] = {}
    for number, (name, schema) in enumerate(schemas.items()):
        prepare_part = partial(_lenient, error_of=error_of, left_out=left_out) if name in lenient else prepare
        part = _schema_part(number, schema, f"in the parameters of '{name}'", {}, prepare_part)
        grammars += part
        parts.append((part, f"the parameters of '{name}'"))
    if answer is None:
        alone: Iterable[tuple[str, str]] = ((json.dumps({"grammars": part}), place) for part, place in parts)
    else:
        prepared = _lenient(answer, error_of, left_out, is_open=True) if answer_is_lenient else prepare(answer)
        layout = _layout(in_one_line=in_one_line)
        grammars += _schema_grammars(prepared, layout, "answer", is_lenient=answer_is_lenient)
        alone = _subschemas(prepared)
    may_leave_out = answer_is_lenient or bool(lenient)
    return Translated(json.dumps({"grammars": grammars}), alone, may_leave_out=may_leave_out, left_out=[*left_out])


def _schema_part(
    number: int,
    schema: Any,
    place: str,
    separators: dict[str, Any],
    prepare_part: Callable[[str], PreparedSchema] = prepare,
) -> list[dict[str, Any]]:
    """Return a schema as parts of a grammar, which calls the first `@schema_` with the number. Raises Refused."""
    text = json.dumps(schema)
    try:
        return _schema_grammars(prepare_part(text), separators, f"schema_{number}")
    except Refused as refused:
        raise Refused(f"{refused.reason}, {place}") from None


def _client_lark(text: str) -> Translated:
    """Translate a client's grammar, without its first line of options. Raises Refused if its rules concern anything
    other than text, or take too long to compile."""
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
    return Translated(json.dumps({"grammars": [_unforced(lark), *chain.from_iterable(schemas)]}))


def _without_schemas(text: str) -> tuple[list[str], list[list[dict[str, Any]]]]:
    """Return the pieces of a Lark grammar between its JSON Schemas, and each schema as a grammar."""
    pieces: list[str] = []
    schemas: list[list[dict[str, Any]]] = []
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
