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
    forced = _forced(dialect, tools)
    if constraint is not None and forced is not None and constraint.param not in TEXT_FORMATS:
        # A forced call has no text, so a text format doesn't apply to it. Clients send both.
        raise invalid(constraint.param, f"is not allowed together with '{forced.param}' of which one must be called")
    if forced is not None:
        return forced, tools
    if constraint is None:
        return _on_strict_calls(dialect, tools), tools
    return _or_calls(dialect, tools, constraint)


def _forced(dialect: Dialect, tools: Tools | None) -> Grammar | None:
    family = dialect.calls
    if tools is None or family is None or not tools.is_forced:
        return None
    if tools.raw is not None:
        (name,) = tools.schemas
        if family.by_channels:  # The input follows the marks of a channel.
            return replace(tools.raw, prefix=lark_of(f"{family.opening}{name}{family.name_end}", dialect.special_ids))
        return tools.raw
    schemas = {name: forced_schema(schema) for name, schema in tools.schemas.items()}
    text = family.grammar(schemas, only_one=tools.only_one, special_ids=dialect.special_ids, strict=tools.strict)
    return Grammar("lark_with_schemas", text, param="tools")


def _on_strict_calls(dialect: Dialect, tools: Tools | None) -> Grammar | None:
    """Return a constraint that applies only to calls of strict tools. The rest of the answer is free."""
    family = dialect.calls
    if tools is None or family is None or not tools.strict:
        return None
    schemas = {name: forced_schema(tools.schemas[name]) for name in tools.schemas if name in tools.strict}
    leads, text = family.strict_grammar(schemas, dialect.special_ids)
    return Grammar("lark_with_schemas", text, param="tools", leads=leads)


def _or_calls(dialect: Dialect, tools: Tools | None, constraint: Grammar) -> tuple[Grammar, Tools | None]:
    """Return a constraint under which the model may also call tools, if the given one is on JSON. The arguments of
    tools that aren't strict may be any object."""
    family = dialect.calls
    if tools is None or family is None or constraint.kind not in ("json_object", "json_schema"):
        if tools is not None:  # Such an answer holds no call, and the grammar could not check strict ones.
            others = {name: schema for name, schema in tools.schemas.items() if name not in tools.strict}
            tools = replace(tools, schemas=others)
        opening = "" if family is None else family.answer_opening
        if opening:
            constraint = replace(constraint, prefix=lark_of(opening, dialect.special_ids))
        return constraint, tools
    schemas = {
        name: forced_schema(schema) if name in tools.strict else ANY_OBJECT for name, schema in tools.schemas.items()
    }
    any_object = msgspec.json.encode(ANY_OBJECT).decode()
    text = family.grammar(
        schemas,
        only_one=tools.only_one,
        special_ids=dialect.special_ids,
        strict=tools.strict,
        answer=constraint.text if constraint.kind == "json_schema" else any_object,
    )
    return replace(constraint, kind="lark_with_schemas", text=text), tools


def forced_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema for forced arguments, without further properties, which a forced model would invent for ever."""
    if schema.keys() & _KEYS_OF_PROPERTIES:
        return schema
    listed = schema.get("properties", {})
    unlisted = {name: True for name in schema.get("required", ()) if name not in listed}
    return {**schema, "properties": {**listed, **unlisted}, "additionalProperties": False}
