"""Schemas to draw answers under: what clients send, and what is hard. Data only."""

from __future__ import annotations

from typing import Any

Schema = Any

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
NULL = {"type": "null"}


def closed(properties: dict[str, Schema], *optional: str, **keywords: Any) -> Schema:
    """Return an object as strict clients describe it."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **keywords,
    }


def open_object(properties: dict[str, Schema], *required: str, **keywords: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **keywords}


def array(items: Schema, **keywords: Any) -> Schema:
    return {"type": "array", "items": items, **keywords}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL], "default": None}


def nested(num_levels: int) -> Schema:
    schema: Schema = {"enum": ["the end", None]}
    for level in range(num_levels):
        schema = closed({f"level_{level}": schema, "n": integer(0, 9)}, "n")
    return schema


ADDRESS = closed(
    {
        "street": {"type": "string", "minLength": 1, "maxLength": 12, "title": "Street"},
        "zip": {"type": "string", "pattern": "^\\d{5}(-\\d{4})?$"},
        "country": {"$ref": "#/$defs/Country"},
    }
)
COUNTRY = {"enum": ["DE", "FR", "FRO", "GB"], "title": "Country", "type": "string"}
SAFE = 2**53 - 1
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
ZOD_DATETIME = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])"
    r"-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
    r"T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"
)
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,6}|(?=[\d.]{1,9}0*$)\d{0,6}\.\d{0,2}0*$)"

SCHEMAS: dict[str, Schema] = {
    # As frameworks write them.
    "pydantic: an order": closed(
        {
            "id": {"type": "string", "format": "uuid4"},
            "placed": {"type": "string", "format": "date-time"},
            "total": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": DECIMAL}]},
            "address": nullable({"$ref": "#/$defs/Address"}),
            "lines": array({"$ref": "#/$defs/Line"}, minItems=1, maxItems=2),
        },
        **{
            "$defs": {
                "Address": ADDRESS,
                "Country": COUNTRY,
                "Line": closed({"sku": {"type": "string", "pattern": "^[A-Z]{3}-\\d+$"}, "count": integer(1, 99)}),
            }
        },
    ),
    "zod: a user": closed(
        {
            "id": {"type": "string", "format": "uuid", "pattern": ZOD_UUID},
            "mail": {"type": "string", "format": "email", "pattern": ZOD_EMAIL, "maxLength": 40},
            "since": {"type": "string", "format": "date-time", "pattern": ZOD_DATETIME},
            "age": {"type": "integer", "exclusiveMinimum": 0, "maximum": SAFE},
            "role": {"type": "string", "enum": ["admin", "user"]},
            "score": {"type": "integer", "minimum": -SAFE, "maximum": SAFE},
        },
        **{"$schema": "https://json-schema.org/draft/2020-12/schema"},
    ),
    "strict: steps of a solution": closed(
        {
            "steps": array(closed({"explanation": {"type": "string", "maxLength": 30}, "output": TEXT}), maxItems=2),
            "final_answer": {"type": "string", "maxLength": 20},
        }
    ),
    "strict: a user interface that nests": closed(
        {
            "type": {"type": "string", "enum": ["div", "button", "header", "section", "field", "form"]},
            "label": {"type": "string", "maxLength": 10},
            "children": array({"$ref": "#"}),
            "attributes": array(closed({"name": {"enum": ["class", "href"]}, "value": TEXT}), maxItems=2),
        }
    ),
    "strict: a linked list": closed(
        {"list": {"$ref": "#/$defs/node"}},
        **{"$defs": {"node": closed({"value": NUMBER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]}})}},
    ),
    "agents: one of several calls": {
        "oneOf": [
            closed({"tool": {"const": "search"}, "query": {"type": "string", "minLength": 1}, "top": integer(1, 20)}),
            closed({"tool": {"const": "open"}, "url": {"type": "string", "format": "uri"}}),
            closed({"tool": {"const": "done"}, "answer": TEXT, "sources": array(INTEGER)}, "sources"),
        ]
    },
    "agents: a plan": open_object(
        {
            "thoughts": {"type": "string", "description": "Think first", "maxLength": 60},
            "actions": array({"enum": ["read", "write", "ask"]}, uniqueItems=True, minItems=1),
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            "done": {"type": "boolean"},
        },
        "thoughts",
        "actions",
        "done",
    ),
    "extraction: persons": array(
        open_object(
            {
                "name": {"type": ["string", "null"], "maxLength": 15},
                "born": {"type": ["string", "null"], "format": "date"},
                "height": {"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 2.8},
            },
            "name",
        ),
        minItems=1,
        maxItems=3,
    ),
    "extraction: a graph": closed(
        {
            "nodes": array(closed({"id": integer(0, 9), "label": {"enum": ["person", "place"]}}), maxItems=3),
            "edges": array(
                {"type": "array", "prefixItems": [integer(0, 9), integer(0, 9)], "items": False, "minItems": 2},
                maxItems=3,
            ),
        }
    ),
    "OpenAPI: inheritance": {
        "allOf": [
            {"$ref": "#/components/schemas/Pet"},
            open_object({"hunts": {"type": "boolean"}, "lives": {"type": "integer", "format": "int32"}}, "lives"),
        ],
        "components": {"schemas": {"Pet": open_object({"name": {"type": "string", "maxLength": 9}}, "name")}},
    },
    "draft 7: definitions and tuples": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"positive": {"type": "integer", "exclusiveMinimum": 0}},
        **closed(
            {
                "pair": {
                    "type": "array",
                    "items": [{"$ref": "#/definitions/positive"}, TEXT],
                    "additionalItems": {"type": "boolean"},
                    "minItems": 2,
                    "maxItems": 4,
                }
            }
        ),
    },
    "draft 4: exclusive bounds": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        **closed({"low": {"type": "number", "minimum": 1.5, "exclusiveMinimum": True, "maximum": 3}}),
    },
    # Values.
    "values: enum of all types": {
        "enum": ["a", "ab", "abc", "a b", 1, 10, 1.5, -0.25, None, True, [1, [2]], {"k": {}}]
    },
    "values: const": closed({"version": {"const": 2}, "kind": {"const": {"b": [1, "x"], "a": None}}, "x": {}}, "x"),
    "numbers: integers between bounds": array(
        {"anyOf": [integer(-17, 305), integer(999, 1001), {"type": "integer", "maximum": -1000}]},
        minItems=3,
        maxItems=6,
    ),
    "numbers: fractions between bounds": array(
        {"type": "number", "exclusiveMinimum": -0.5, "maximum": 12.25}, minItems=3, maxItems=6
    ),
    "numbers: multiples": closed(
        {
            "price": {"type": "number", "multipleOf": 0.01, "minimum": 0, "exclusiveMaximum": 1000},
            "dozen": {"type": "integer", "multipleOf": 12},
            "half": {"type": "number", "multipleOf": 0.5, "minimum": -3, "maximum": 3},
        }
    ),
    "strings: lengths in characters": array({"type": "string", "minLength": 2, "maxLength": 5}, minItems=3, maxItems=5),
    "strings: patterns": closed(
        {
            "search": {"type": "string", "pattern": "b[aeiou]t", "maxLength": 12},
            "anchors": {"type": "string", "pattern": "^(yes|no)$|^maybe", "maxLength": 8},
            "word": {"type": "string", "pattern": "^[A-ZÄÖÜ][a-zäöüß]{2,6}$"},
            "both": {"type": "string", "pattern": "^[a-z]+$", "minLength": 4, "maxLength": 6},
        }
    ),
    "strings: escapes": closed({"path": {"type": "string", "pattern": '^[A-Z]:\\\\("|\\n|/|\\t){1,4}$'}, "rest": TEXT}),
    "formats: JSON Schema's": closed(
        {
            name: {"type": "string", "format": name, "maxLength": 45}
            for name in ("date", "time", "duration", "uuid", "ipv4", "ipv6", "hostname", "email", "uri")
        },
    ),
    "formats: of libraries": closed(
        {
            name: {"type": "string", "format": name, "maxLength": 24}
            for name in (
                "ipvanyaddress",
                "base64",
                "base64url",
                "byte",
                "binary",
                "password",
                "e164",
                "nanoid",
                "cuid2",
            )
        }
    ),
    # Lists.
    "lists: tuples with a rest": {
        "type": "array",
        "prefixItems": [{"enum": ["add", "mul"]}, NUMBER],
        "items": integer(0, 9),
        "minItems": 1,
        "maxItems": 6,
    },
    "lists: matrices": array(array(integer(-9, 9), minItems=2, maxItems=2), minItems=2, maxItems=3),
    "lists: different values": closed(
        {
            "flags": array({"type": "boolean"}, uniqueItems=True),
            "order": array({"$ref": "#/$defs/step"}, uniqueItems=True, minItems=4, maxItems=4),
        },
        **{"$defs": {"step": {"enum": ["wash", "rinse", "dry", "fold"]}}},
    ),
    # Objects.
    "objects: many optional properties": open_object({f"option_{i}": integer(0, 3) for i in range(12)}),
    "objects: names of any kind": {"type": "object", "additionalProperties": integer(0, 99), "maxProperties": 3},
    "objects: names by pattern": {
        "type": "object",
        "patternProperties": {"^is_[a-z]{1,8}$": {"type": "boolean"}, "^num_[a-z]{1,8}$": INTEGER},
        "additionalProperties": False,
        "maxProperties": 4,
    },
    "objects: names of an enum": {
        "type": "object",
        "propertyNames": {"enum": ["ä", "b", "b c"]},
        "additionalProperties": array(INTEGER, maxItems=2),
    },
    "objects: required but not listed": open_object({"a": {"type": "boolean"}}, "a", "extra", maxProperties=3),
    "objects: one property at least": open_object(
        {"a": integer(0, 9), "b": TEXT, "c": NULL}, minProperties=1, additionalProperties=False
    ),
    "objects: keys and values beyond ASCII": closed(
        {
            "größe": integer(1, 3),
            "日本語": {"enum": ["はい", "いいえ"]},
            "🙂": {"const": "👍🏽"},
            'a"b': {"enum": ['"', "\\", "/", "\n"]},
            "c\\d\te": {"type": "boolean"},
        }
    ),
    # Joined, recursive and deep.
    "joined: all of three": {
        "allOf": [
            open_object({"a": {"type": "number", "minimum": 2}}, "a"),
            open_object({"a": {"maximum": 40, "multipleOf": 2}, "b": {"enum": ["x", "y", 1]}}, "b"),
            open_object({"b": TEXT}),
        ]
    },
    "joined: any of beside properties": open_object(
        {"kind": {"enum": ["circle", "square"]}, "radius": integer(1, 9), "side": integer(1, 9)},
        "kind",
        anyOf=[
            {"properties": {"kind": {"const": "circle"}}, "required": ["radius"]},
            {"properties": {"kind": {"const": "square"}}, "required": ["side"]},
        ],
    ),
    "joined: reference beside bounds": closed(
        {"percent": {"$ref": "#/$defs/n", "maximum": 100}, "any": {"$ref": "#/$defs/n"}},
        **{"$defs": {"n": {"type": "integer", "minimum": 0}}},
    ),
    "joined: unions of unions": {
        "oneOf": [
            {"anyOf": [integer(0, 5), {"type": "string", "maxLength": 3}]},
            {"oneOf": [NULL, array({"oneOf": [{"type": "boolean"}, NULL]}, maxItems=3)]},
        ]
    },
    "recursive: expressions": {
        "$ref": "#/$defs/expression",
        "$defs": {
            "expression": {
                "anyOf": [
                    integer(0, 99),
                    {"type": "string", "pattern": "^[a-z]$"},
                    closed(
                        {
                            "op": {"enum": ["+", "*"]},
                            "args": array({"$ref": "#/$defs/expression"}, minItems=2, maxItems=2),
                        }
                    ),
                ]
            }
        },
    },
    "recursive: two that need each other": {
        "$ref": "#/$defs/folder",
        "$defs": {
            "folder": closed({"folder": {"type": "string", "maxLength": 6}, "entries": {"$ref": "#/$defs/entries"}}),
            "entries": array({"anyOf": [{"$ref": "#/$defs/folder"}, {"$ref": "#file"}]}, maxItems=3),
            "file": {"$anchor": "file", **closed({"file": {"type": "string", "maxLength": 6}, "size": INTEGER})},
        },
    },
    "deep: 20 levels": nested(20),
    "anything": {},
}

REGEXES = {
    "regex: a number plate": r"[A-ZÄÖÜ]{1,3}-[A-Z]{1,2} [1-9]\d{0,3}",
    "regex: an e-mail": r"[a-z0-9._]{1,12}@[a-z]{2,10}\.(com|org|net)",
    "regex: a date in words": r"(Mon|Tues|Wednes)day, \d{1,2} (January|June|July) (19|20)\d\d",
    "regex: nested repetitions": r"((a|bc)+d?){2,4}!",
    "regex: anything that is not": r"[^0-9\s]{5,20}\.",
}
CHOICES = {
    "choice: beginnings of each other": ["a", "ab", "abc", "b", "yes", "yes and no", "no"],
    "choice: beyond ASCII": ["größer", "größe", "日本", "日本語", "👍", "👍🏽", " blank", "line\nbreak"],
}
