"""The constraints on the text of an answer that clients may ask for, each made into a `Grammar`.

OpenAI's name for them is response_format, vLLM's is structured_outputs (before that guided_json and the like), and
llama.cpp's are grammar and json_schema. What is in a schema or a grammar is checked where it is compiled. This file
knows nothing of HTTP, and only the request types of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from oaiserve.engine.request import Grammar, GrammarKind
from oaiserve.errors import InvalidRequest
from oaiserve.routes.protocol import SamplingBody, invalid, show

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_GBNF_DEFINITION = re.compile(r"^\s*[A-Za-z0-9_-]+\s*::=", re.ASCII | re.MULTILINE)
_PARAMS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "json_schema"),
)
# They are about the text of an answer, the others about all that is generated.
TEXT_FORMATS = ("response_format", "text.format")
_TYPES = "'text', 'json_object' or 'json_schema'"
_SCHEMA_KEYS = {"name", "schema", "strict", "description"}
_KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured_outputs
# Other fields of structured_outputs, with the values that change nothing here: answers have no white space anyway.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}


def grammar(body: SamplingBody, other: Grammar | None = None) -> Grammar | None:
    """Return the constraint of the body, or None if it has none. `other` is one that it has under a name that only its
    route knows. Raises InvalidRequest."""
    found = [*([] if other is None else [other]), *_grammars(body)]
    if len(found) > 1:
        names = " and ".join(f"'{each.param}'" for each in found[:2])
        raise invalid(found[1].param, f"only one constraint on the answer is allowed, got {names}")
    return found[0] if found else None


def text_format(value: Any) -> Grammar | None:
    """Return the constraint that `text.format` of /v1/responses asks for: response_format with its fields on one level.

    Raises InvalidRequest.
    """
    where = param = "text.format"
    if not isinstance(value, dict):
        raise invalid(param, f"must be an object, got {show(value)}")
    match value.get("type"):
        case "text":
            _refuse_others(value, {"type"}, where, param)
            return None
        case "json_object":
            _refuse_others(value, {"type"}, where, param)
            return Grammar("json_object", "", param)
        case "json_schema":
            _refuse_others(value, {"type", *_SCHEMA_KEYS}, where, param)
            return _named_schema(value, where, param)
        case kind:
            raise _invalid(param, f"{where}.type", f"must be {_TYPES}, got {show(kind)}")


def is_constrained(body: SamplingBody) -> bool:
    """Return whether the body has a constraint, without a look at what is in it."""
    return body.response_format not in (None, {"type": "text"}) or any(
        getattr(body, name) for name in _PARAMS if name != "response_format"
    )


def _grammars(body: SamplingBody) -> Iterator[Grammar]:
    if body.response_format is not None:
        yield from _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _structured_outputs(body.structured_outputs)
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, name := f"guided_{kind}")) is not None:
            yield _of_kind(kind, value, name, name)
    if body.grammar:
        yield _of_kind("grammar", body.grammar, "grammar", "grammar")
    if body.json_schema is not None:
        yield _of_kind("json", body.json_schema, "json_schema", "json_schema")


def _response_format(value: dict[str, Any]) -> Iterator[Grammar]:
    param, kind = "response_format", value.get("type")
    match kind:
        case "text":
            _refuse_others(value, {"type"}, param, param)
        case "json_object":
            _refuse_others(value, {"type", "schema"}, param, param)
            if value.get("schema") is None:
                yield Grammar("json_object", "", param)
            else:  # llama.cpp takes a schema here, too
                yield _of_kind("json", value["schema"], f"{param}.schema", param)
        case "json_schema":
            _refuse_others(value, {"type", "json_schema"}, param, param)
            named = value.get("json_schema")
            where = f"{param}.json_schema"
            if not isinstance(named, dict):
                raise _invalid(param, where, f"must be an object with 'name' and 'schema', got {show(named)}")
            _refuse_others(named, _SCHEMA_KEYS, where, param)
            yield _named_schema(named, where, param)
        case _:
            raise _invalid(param, f"{param}.type", f"must be {_TYPES}, got {show(kind)}")


def _named_schema(value: dict[str, Any], where: str, param: str) -> Grammar:
    name, schema = value.get("name"), value.get("schema")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        reason = f"must have 1 to 64 letters, digits, '_' or '-', got {show(name)}"
        raise _invalid(param, f"{where}.name", reason)
    if not isinstance(value.get("strict"), bool | None):
        raise _invalid(param, f"{where}.strict", f"must be true or false, got {show(value['strict'])}")
    if not isinstance(schema, dict):
        raise _invalid(param, f"{where}.schema", f"must be an object, got {show(schema)}")
    return _of_kind("json", schema, f"{where}.schema", param)


def _structured_outputs(value: dict[str, Any]) -> Iterator[Grammar]:
    param = "structured_outputs"
    for name, given in value.items():
        if name in _OPTIONS:
            if given is not None and given not in _OPTIONS[name]:
                raise _invalid(param, f"{param}.{name}", f"the value {show(given)} is not supported")
        elif name not in _KINDS:
            raise _invalid(param, f"{param}.{name[:60]}", "is not supported")
    given_kinds = [name for name in _KINDS if value.get(name) is not None and value[name] is not False]
    if len(given_kinds) != 1:
        raise invalid(param, f"must have one of {', '.join(_KINDS)}, got {', '.join(given_kinds) or 'none'}")
    yield _of_kind(given_kinds[0], value[given_kinds[0]], f"{param}.{given_kinds[0]}", param)


def _of_kind(kind: str, value: Any, where: str, param: str) -> Grammar:
    """Make a grammar of a value of vLLM's kind. `where` is its place, for errors."""
    match kind, value:
        case "json", dict():
            return Grammar("json_schema", msgspec.json.encode(value).decode(), param)
        case "json", str():
            return Grammar("json_schema", value, param)
        case "regex", str():
            return Grammar("regex", value, param)
        case "grammar", str():
            form: GrammarKind = "gbnf" if _GBNF_DEFINITION.search(value) else "lark"
            return Grammar(form, value, param)
        case "choice", [_, *_] if all(isinstance(choice, str) for choice in value):
            return Grammar("choice", msgspec.json.encode(value).decode(), param)
        case "json_object", True:
            return Grammar("json_object", "", param)
    wanted = {
        "json": "a JSON Schema, as an object or a string",
        "choice": "a list of strings that is not empty",
        "json_object": "true",
    }
    raise _invalid(param, where, f"must be {wanted.get(kind, 'a string')}, got {show(value)}")


def _refuse_others(value: dict[str, Any], known: set[str], where: str, param: str) -> None:
    for name in value.keys() - known:
        if value[name] is not None:
            raise _invalid(param, f"{where}.{name[:60]}", "is not supported")


def _invalid(param: str, where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{where}': {reason}.", param=param)
