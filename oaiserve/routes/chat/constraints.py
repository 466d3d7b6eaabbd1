"""The clients' constraints on the text of an answer, each turned into a `Grammar`.

OpenAI calls them response_format, vLLM structured_outputs, and llama.cpp grammar and json_schema. The content of a
schema or a grammar is checked when it is compiled. This file knows nothing of HTTP, and of the engine only the types of
requests and formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from oaiserve.engine.grammars.json_schema.prepare import prepare_leniently
from oaiserve.engine.request import Grammar, GrammarKind
from oaiserve.errors import InvalidRequest
from oaiserve.routes.adaptations import Note, not_enforced
from oaiserve.routes.intake.body_types import SamplingBody
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import (
    NAME,
    AnyObject,
    AnyText,
    ByRegex,
    BySchema,
    NamedSchema,
    PlainObject,
    PlainSchema,
    StructuredOutputs,
    TextFormat,
)

GBNF_DEFINITION = re.compile(r"^[ \t]*+[A-Za-z0-9_-]++\s*+::=", re.ASCII | re.MULTILINE)
_NAME = re.compile(NAME.removeprefix("^").removesuffix("$"))
_PARAMS = ("response_format", "structured_outputs", "grammar", "json_schema")
# These constrain the text of an answer, the others everything that is generated.
TEXT_FORMATS = ("response_format", "text.format", "output_config.format")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")  # kinds of structured_outputs
MOST_REMEMBERED = 2**13  # maximum characters of a schema that is cached


def grammar(body: SamplingBody, note: Note, other: Grammar | None = None) -> Grammar | None:
    """Return the constraint of the body, or the `other` one under the route's own name, or None. Raises
    InvalidRequest."""
    grammars = [*([] if other is None else [other]), *_grammars(body)]
    if not grammars:
        return None
    first = grammars[0]
    for each in grammars[1:]:
        # Clients send the same constraint under two names.
        if (each.kind, each.text) != (first.kind, first.text):
            same = each.param == first.param
            names = f"two in '{first.param}'" if same else f"'{first.param}' and '{each.param}'"
            raise invalid(each.param, f"only one constraint on the answer is allowed, got {names}")
    strictest = next((each for each in grammars if not each.is_lenient), first)
    if strictest.is_lenient:
        note_not_obeyed(strictest.text, strictest.param, note)
    return replace(strictest, in_one_line=any(each.in_one_line for each in grammars))


def note_not_obeyed(schema: str, place: str, note: Note) -> None:
    """Note the keywords of a schema that no grammar can enforce."""
    # A session sends the same schemas with each request. Long schemas would take too much memory in the cache.
    keywords = not_obeyed if len(schema) <= MOST_REMEMBERED else not_obeyed.__wrapped__
    for keyword in keywords(schema):
        note(place, not_enforced(keyword))


@lru_cache(1024)
def not_obeyed(schema: str) -> Sequence[str]:
    """Return the keywords of a schema that no grammar can enforce; "" for all."""
    return prepare_leniently(schema)[1]


def text_format(value: TextFormat) -> Grammar | None:
    """Return the constraint in `text.format` of /v1/responses. Raises InvalidRequest."""
    param = "text.format"
    match value:
        case PlainObject():
            return Grammar("json_object", "", param)
        case PlainSchema():
            return _named_schema(value, param, param)
    return None


def json_format(schema: Mapping[str, Any]) -> Grammar:
    """Return the constraint in `output_config.format` of /v1/messages. Raises InvalidRequest."""
    param = "output_config.format"
    return _of_kind("json", schema, f"{param}.schema", param)


def is_constrained(body: SamplingBody) -> bool:
    """Return whether the body has a constraint, without reading its content."""
    return not isinstance(body.response_format, AnyText | None) or any(
        getattr(body, name) for name in _PARAMS if name != "response_format"
    )


def _grammars(body: SamplingBody) -> Iterator[Grammar]:
    param = "response_format"
    match body.response_format:
        case AnyObject(schema=None, value=None):
            yield Grammar("json_object", "", param)
        case AnyObject(schema=schema, value=value):
            yield from (_of_kind("json", each, param, param) for each in (schema, value) if each is not None)
        case BySchema(json_schema=None, value=None):
            raise InvalidRequest(f"Missing required parameter: '{param}.json_schema'.", param=param)
        case BySchema(json_schema=named, value=value):
            if named is not None:
                yield _named_schema(named, f"{param}.json_schema", param)
            if value is not None:
                yield _of_kind("json", value.schema, param, param)
        case ByRegex(regex):
            yield Grammar("regex", regex, param)
    if body.structured_outputs is not None:
        yield _structured_outputs(body.structured_outputs)
    if body.grammar:
        yield _of_kind("grammar", body.grammar, "grammar", "grammar")
    if body.json_schema is not None:
        yield _of_kind("json", body.json_schema, "json_schema", "json_schema")


def _named_schema(value: NamedSchema, where: str, param: str) -> Grammar:
    if not _NAME.fullmatch(value.name):
        reason = f"must have 1 to 64 letters, digits, '_', '.' or '-', got {show(value.name)}"
        raise invalid(param, reason, f"{where}.name")
    return replace(_of_kind("json", value.schema, f"{where}.schema", param), is_lenient=value.strict is False)


def _structured_outputs(value: StructuredOutputs) -> Grammar:
    param = "structured_outputs"
    if value.disable_additional_properties:
        raise invalid(param, "the value True is not supported", f"{param}.disable_additional_properties")
    constraints = {kind: each for kind in _KINDS if (each := getattr(value, kind)) is not None and each is not False}
    if len(constraints) != 1:
        raise invalid(param, f"must have one of {', '.join(_KINDS)}, got {', '.join(constraints) or 'none'}")
    ((kind, each),) = constraints.items()
    in_one_line = bool(value.disable_any_whitespace) and kind in ("json", "json_object")
    return replace(_of_kind(kind, each, f"{param}.{kind}", param), in_one_line=in_one_line)


def _of_kind(kind: str, value: Any, where: str, param: str) -> Grammar:
    """Make a grammar from a value of one of vLLM's kinds. `where` is its place, for errors."""
    match kind, value:
        case "json", dict():
            return Grammar("json_schema", msgspec.json.encode(value).decode(), param)
        case "json", _:
            return Grammar("json_schema", value, param)
        case "regex", _:
            return Grammar("regex", value, param)
        case "grammar", _:
            form: GrammarKind = "gbnf" if GBNF_DEFINITION.search(value) else "lark"
            return Grammar(form, value, param)
        case "choice", []:
            raise invalid(param, "must be a list of strings that is not empty, got []", where)
        case "choice", _:
            return Grammar("choice", msgspec.json.encode(value).decode(), param)
    return Grammar("json_object", "", param)
