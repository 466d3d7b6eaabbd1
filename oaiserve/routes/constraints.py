"""The clients' constraints on the text of an answer, each made into a `Grammar`.

OpenAI's name for them is response_format, vLLM's is structured_outputs (before that guided_json and the like), and
llama.cpp's are grammar and json_schema. The content of a schema or a grammar is checked where it is compiled. This file
knows nothing of HTTP, and only the request types of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from oaiserve.engine.request import Grammar, GrammarKind
from oaiserve.routes.bodies import MAX_CHARACTERS, MAX_TOOLS, SamplingBody
from oaiserve.routes.invalid import check_name, invalid, show
from oaiserve.routes.objects import (
    AnyObject,
    AnyText,
    BySchema,
    NamedSchema,
    PlainObject,
    PlainSchema,
    StructuralTag,
    StructuredOutputs,
    TextFormat,
)

_GBNF_DEFINITION = re.compile(r"^\s*[A-Za-z0-9_-]+\s*::=", re.ASCII | re.MULTILINE)
_PARAMS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "json_schema"),
)
# They are about the text of an answer, the others about all that is generated.
TEXT_FORMATS = ("response_format", "text.format", "output_config.format")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured_outputs


def grammar(body: SamplingBody, other: Grammar | None = None) -> Grammar | None:
    """Return the constraint of the body, or the `other` of the route's own name, or None. Raises InvalidRequest."""
    found = [*([] if other is None else [other]), *_grammars(body)]
    for each in found[1:]:
        if (each.kind, each.text) != (found[0].kind, found[0].text):  # clients send one under its old and new name
            names = f"'{found[0].param}' and '{each.param}'"
            raise invalid(each.param, f"only one constraint on the answer is allowed, got {names}")
    return found[0] if found else None


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
        case AnyObject(None):
            yield Grammar("json_object", "", param)
        case AnyObject(schema):  # llama.cpp takes a schema here, too
            yield _of_kind("json", schema, f"{param}.schema", param)
        case BySchema(named):
            yield _named_schema(named, f"{param}.json_schema", param)
        case StructuralTag() as tag:
            yield _structural_tag(tag, param)
    if body.structured_outputs is not None:
        yield _structured_outputs(body.structured_outputs)
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, name := f"guided_{kind}")) is not None:
            yield _of_kind(kind, value, name, name)
    if body.grammar:
        yield _of_kind("grammar", body.grammar, "grammar", "grammar")
    if body.json_schema is not None:
        yield _of_kind("json", body.json_schema, "json_schema", "json_schema")


def _named_schema(value: NamedSchema, where: str, param: str) -> Grammar:
    check_name(param, f"{where}.name", value.name)
    return _of_kind("json", value.schema, f"{where}.schema", param)


def _structural_tag(value: StructuralTag, param: str) -> Grammar:
    """Return the grammar of a text in which each trigger begins a structure."""
    texts = [*value.triggers, *(text for each in value.structures for text in (each.begin, each.end))]
    if not 0 < len(value.structures) <= MAX_TOOLS:
        raise invalid(param, f"must be 1 to {MAX_TOOLS}, got {len(value.structures)}", f"{param}.structures")
    if "" in value.triggers or (length := sum(map(len, texts))) > MAX_CHARACTERS:
        reason = "must not be empty" if "" in value.triggers else f"may have {MAX_CHARACTERS} in all, got {length}"
        raise invalid(param, f"the characters of a tag {reason}", param)
    bodies: dict[str, list[str]] = {}  # behind each trigger
    for number, each in enumerate(value.structures):
        trigger = max((text for text in value.triggers if each.begin.startswith(text)), key=len, default=None)
        if trigger is None:
            reason = f"must begin with one of the triggers, got {show(each.begin)}"
            raise invalid(param, reason, f"{param}.structures[{number}].begin")
        parts = (_quoted(each.begin[len(trigger) :]), f"@schema_{number}", _quoted(each.end))
        bodies.setdefault(trigger, []).append(" ".join(parts))
    rules = [
        f"head_{number}[lazy]: TEXT {_quoted(trigger)}\ntag_{number}: head_{number} ({' | '.join(given)})"
        for number, (trigger, given) in enumerate(bodies.items())
    ]
    tags = " | ".join(f"tag_{number}" for number in range(len(rules)))
    lark = "\n".join((f"start: ({tags})* text", "text: TEXT", "TEXT: /(?s:.*)/", *rules))
    schemas = {f"structures[{number}]": each.schema for number, each in enumerate(value.structures)}
    return Grammar("lark_with_schemas", msgspec.json.encode({"lark": lark, "schemas": schemas}).decode(), param)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""


def _structured_outputs(value: StructuredOutputs) -> Grammar:
    param = "structured_outputs"
    if value.disable_additional_properties:
        raise invalid(param, "the value True is not supported", f"{param}.disable_additional_properties")
    given = {kind: each for kind in _KINDS if (each := getattr(value, kind)) is not None and each is not False}
    if len(given) != 1:
        raise invalid(param, f"must have one of {', '.join(_KINDS)}, got {', '.join(given) or 'none'}")
    ((kind, each),) = given.items()
    return _of_kind(kind, each, f"{param}.{kind}", param)


def _of_kind(kind: str, value: Any, where: str, param: str) -> Grammar:
    """Make a grammar of a value of vLLM's kind. `where` is its place, for errors."""
    match kind, value:
        case "json", dict():
            return Grammar("json_schema", msgspec.json.encode(value).decode(), param)
        case "json", _:
            return Grammar("json_schema", value, param)
        case "regex", _:
            return Grammar("regex", value, param)
        case "grammar", _:
            form: GrammarKind = "gbnf" if _GBNF_DEFINITION.search(value) else "lark"
            return Grammar(form, value, param)
        case "choice", []:
            raise invalid(param, "must be a list of strings that is not empty, got []", where)
        case "choice", _:
            return Grammar("choice", msgspec.json.encode(value).decode(), param)
    return Grammar("json_object", "", param)
