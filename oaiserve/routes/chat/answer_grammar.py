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
# A schema with one of these decides itself which properties are allowed besides `properties`.
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
    opening = ""  # text that the model writes before that which the grammar constrains
    if family is not None and tools is not None and tools.is_forced:
        grammar = tools.raw or Grammar("lark_with_schemas", _calls(dialect, family, tools), param="tools")
        if constraint is not None and constraint.param not in TEXT_FORMATS:
            # A forced call has no text, so a text format doesn't apply to it. Clients send both.
            reason = f"is not allowed together with '{grammar.param}' of which one must be called"
            raise invalid(constraint.param, reason)
        if tools.raw is not None and family.by_channels:
            (name,) = tools.schemas
            opening = f"{family.opening}{name}{family.name_end}"
    elif constraint is None:
        if family is None or tools is None or not tools.strict:
            return None, tools
        return _of_strict_calls(dialect, family, tools), tools
    elif (
        family is not None
        and family.is_forcible
        and tools is not None
        and constraint.kind in ("json_object", "json_schema")
    ):
        # The answer is JSON, or else calls.
        answer = constraint.text if constraint.kind == "json_schema" else msgspec.json.encode(ANY_OBJECT).decode()
        grammar = replace(constraint, kind="lark_with_schemas", text=_calls(dialect, family, tools, answer))
    else:
        grammar = constraint
        opening = "" if family is None else family.answer_opening
        if tools is not None:  # Such an answer holds no call, and the grammar could not check strict ones.
            others = {name: schema for name, schema in tools.schemas.items() if name not in tools.strict}
            tools = replace(tools, schemas=others)
    if opening:
        grammar = replace(grammar, prefix=lark_of(opening, dialect.special_ids))
    return grammar, tools


def _calls(dialect: Dialect, family: CallFamily, tools: Tools, answer: str | None = None) -> str:
    """Return the grammar of calls, or of an `answer` by its schema instead. Then the arguments of tools that aren't
    strict may be any object."""
    is_forced = answer is None
    schemas = {
        name: forced_schema(schema) if is_forced or name in tools.strict else ANY_OBJECT
        for name, schema in tools.schemas.items()
    }
    return family.grammar(
        schemas, only_one=tools.only_one, special_ids=dialect.special_ids, answer=answer, strict=tools.strict
    )


def _of_strict_calls(dialect: Dialect, family: CallFamily, tools: Tools) -> Grammar:
    """Return a constraint that applies only to calls of strict tools. The rest of the answer is free."""
    schemas = {name: forced_schema(tools.schemas[name]) for name in tools.schemas if name in tools.strict}
    leads, text = family.strict_grammar(schemas, dialect.special_ids)
    return Grammar("lark_with_schemas", text, param="tools", leads=leads)


def forced_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema for forced arguments, without further properties: a forced model would write too many."""
    if schema.keys() & _KEYS_OF_PROPERTIES:
        return schema
    listed = schema.get("properties", {})
    unlisted = {name: True for name in schema.get("required", ()) if name not in listed}
    return {**schema, "properties": {**listed, **unlisted}, "additionalProperties": False}
