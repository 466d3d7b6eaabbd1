"""The grammar of an answer whose tools are forced, strict, or offered next to a constraint on the answer itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from oaiserve.engine.request import Grammar
from oaiserve.routes.chat.constraints import TEXT_FORMATS
from oaiserve.routes.chat.tools import Tools
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.lark import lark_of
from oaiserve.routes.intake.invalid import invalid

ANY_OBJECT = {"type": "object"}
# A schema with one of these keywords decides by itself which other properties are allowed.
_KEYS_OF_PROPERTIES = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf", "if", "minProperties"),
}


def answer_grammar(
    dialect: Dialect, tools: Tools | None, constraint: Grammar | None
) -> tuple[Grammar | None, Tools | None]:
    """Return the grammar of an answer under a client's `constraint`, and the tools that it may call. Raises
    InvalidRequest if the constraint cannot be combined with the tools."""
    family = dialect.calls
    opening = ""  # text that the model writes before the part that the grammar constrains
    grammar = None if family is None or tools is None else _of_calls(dialect, family, tools, constraint)
    if grammar is None:
        if constraint is None:
            return None, tools
        grammar = constraint
        opening = "" if family is None else family.answer_opening
        if tools is not None:  # Such an answer holds no call, and the grammar could not check strict ones.
            others = {name: schema for name, schema in tools.schemas.items() if name not in tools.strict}
            tools = replace(tools, schemas=others)
    elif family is not None and family.by_channels and tools is not None and grammar is tools.raw:
        (name,) = tools.schemas
        opening = f"{family.opening}{name}{family.name_end}"
    if opening:
        grammar = replace(grammar, prefix=lark_of(opening, dialect.special_ids))
    return grammar, tools


def _of_calls(dialect: Dialect, family: CallFamily, tools: Tools, constraint: Grammar | None) -> Grammar | None:
    """Return the grammar of forced calls, of strict ones within a free answer, or of calls instead of an answer that
    is JSON. None: the tools add nothing to the constraint."""
    answer: str | None = None  # the schema of the answer that there may be instead of calls
    if tools.is_forced:
        # A forced call has no text, so a text format doesn't apply to it. Clients send both.
        if constraint is not None and constraint.param not in TEXT_FORMATS:
            param = "tools" if tools.raw is None else tools.raw.param
            raise invalid(constraint.param, f"is not allowed together with '{param}' of which one must be called")
        if tools.raw is not None:
            return tools.raw
    elif constraint is None:
        if not tools.strict:
            return None
    elif family.is_forcible and constraint.kind in ("json_object", "json_schema"):
        answer = constraint.text if constraint.kind == "json_schema" else msgspec.json.encode(ANY_OBJECT).decode()
    else:
        return None
    schemas = {
        name: forced_schema(schema) if tools.is_forced or name in tools.strict else ANY_OBJECT
        for name, schema in tools.schemas.items()
    }
    ids = dialect.special_ids
    if tools.is_forced or answer is not None:
        text = family.grammar(schemas, only_one=tools.only_one, special_ids=ids, answer=answer, strict=tools.strict)
        if answer is None or constraint is None:
            return Grammar("lark_with_schemas", text, param="tools")
        return replace(constraint, kind="lark_with_schemas", text=text)
    strict = {name: schema for name, schema in schemas.items() if name in tools.strict}
    leads, text = family.strict_grammar(strict, ids)
    return Grammar("lark_with_schemas", text, param="tools", leads=leads)


def forced_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema for forced arguments that allows no further properties: a model that must call would add too
    many."""
    if schema.keys() & _KEYS_OF_PROPERTIES:
        return schema
    listed = schema.get("properties", {})
    unlisted = {name: True for name in schema.get("required", ()) if name not in listed}
    return {**schema, "properties": {**listed, **unlisted}, "additionalProperties": False}
