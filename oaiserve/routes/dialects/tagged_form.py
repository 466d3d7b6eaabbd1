"""`TaggedForm`: a call with a tag for each argument, described by texts; its patterns, and its grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex

from oaiserve.engine.text.schema_types import SchemaTypes
from oaiserve.routes.dialects.lark import KEY, TYPE, lark_of
from oaiserve.routes.dialects.sites import SPACE, Site

# A schema with one of these keywords constrains more than the values of single properties.
_NOT_BY_VALUE = {"$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "propertyNames", "minProperties"}
_OF_STRINGS = {"pattern", "format", "minLength", "maxLength", "const"}
_PATTERNS = {
    "name": r'(?P<name>[^<>"\s{}=(]++)',
    "key": r'(?P<key>(?!/)[^<>"\n]++)',
    "is_string": "(?P<type>true|false)",
    "type": "(?P<type>[a-z]++)",
    "number": r"\d*+",
}


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """The texts before the arguments, before and after each value, and after the arguments.

    In them, `{name}`, `{key}`, `{type}` and `{number}` stand for the tool, the argument, its type, and the index of the
    call, and `{is_string}` for "true" or "false". Values that are strings have no quotes, others are JSON. Around a
    value, a line break at the form's edge belongs to the tags. In `quotes`, a string may contain the tag that follows
    it.
    """

    begin: str
    key: str
    value_end: str
    end: str
    quotes: tuple[str, str] = ("", "")

    def site(self, opening_tags: tuple[str, ...], closing_tags: tuple[str, ...]) -> Site:
        before, _, after = self.begin.rpartition("{name}")
        lead = before.rpartition("{name}")[2]
        leads = [r"\s*".join(map(regex.escape, text.split("\n"))) for text in ([lead] if lead else opening_tags)]
        return Site(
            f"(?:{'|'.join(leads)})",
            r'^<>"\s{}=(',
            (after.strip(), SPACE),
            (SPACE, self.end or closing_tags[0]),
            is_spaced=not lead,
            is_own_form=True,
        )

    @property
    def closing(self) -> str:
        return self.value_end.strip()

    def body(
        self, name: str, schema: Mapping[str, Any], schemas: dict[str, Any], special_ids: Mapping[str, int]
    ) -> str | None:
        """Return the grammar of the inside of a call, or None if the form cannot express the schema.

        It adds the schemas of values to `schemas`. Lark names them by their index.
        """
        arguments = self.arguments(name, schema, schemas, special_ids)
        begin = lark_of(self.begin.replace("{name}", name), special_ids)
        end = lark_of(self.end, special_ids)
        if arguments is None:
            return None
        return " ".join(filter(None, (begin, arguments, end)))

    def arguments(
        self, name: str, schema: Mapping[str, Any], schemas: dict[str, Any], special_ids: Mapping[str, int]
    ) -> str | None:
        """Return the part of `body` between the form's beginning and its end."""
        properties = schema.get("properties") or {}
        if not is_by_value(schema):
            return None
        parts: list[str] = []
        types_in = SchemaTypes(schema)
        if not properties and schema.get("additionalProperties") is not False:
            if KEY in self.value_end:
                return None
            parts.append(f"({self._before(KEY, special_ids, is_string=False)} {self._text(KEY, special_ids)})*")
        for key, value in properties.items():
            if not pattern_of("{key}").fullmatch(key):
                return None
            end = self.value_end.replace(KEY, key)
            ends = lark_of(end, special_ids)
            types = types_in.of(value)
            if is_text := types == ("string",):
                if value.keys() & (_OF_STRINGS | _NOT_BY_VALUE):
                    return None
                if "enum" not in value:
                    written = self._text(key, special_ids)
                elif choices := _texts(value["enum"]):
                    written = f"({' | '.join(lark_of(choice + end, special_ids) for choice in choices)})"
                else:
                    return None
            elif types and "string" not in types:
                written = f"@schema_{len(schemas)} {ends}"
                schemas[f"{name}/{key}"] = value
            else:
                return None
            part = f"{self._before(key, special_ids, is_string=is_text)} {written}"
            parts.append(part if key in (schema.get("required") or ()) else f"({part})?")
        return " ".join(parts)

    def terminals(self, special_ids: Mapping[str, int]) -> str:
        """Return the definition of TEXT: any text up to the tag after a value, and the same up to a special token."""
        before, _ = self._ending(special_ids)
        is_special = any(tag in self.value_end for tag in special_ids)
        without = "" if is_special else f" & ~/(?s:.*){_escaped(before.strip())}(?s:.*)/"  # a text has no special token
        quoted = ""
        if self.quotes[0]:
            opens, closes = map(_escaped, self.quotes)
            without += f" & ~/{opens}(?s:.*)/"
            quoted = f"\nQUOTED: {json.dumps(self.quotes[0])} INSIDE {json.dumps(self.quotes[1])}"
            quoted += f"\nINSIDE: /(?s:.*)/ & ~/(?s:.*){closes}(?s:.*)/"
        return f"TEXT: BODY {json.dumps(before)}\nBODY: /(?s:.*)/{without}{quoted}"

    def _text(self, key: str, special_ids: Mapping[str, int]) -> str:
        text = f"TEXT {lark_of(self._ending(special_ids)[1].replace(KEY, key), special_ids)}"
        if not self.quotes[0]:
            return text
        return f"({text} | QUOTED {lark_of(self.value_end, special_ids)})"

    def _ending(self, special_ids: Mapping[str, int]) -> tuple[str, str]:
        """Return the end of a value up to a special token or to the tag with the key, and the rest."""
        end = self.value_end
        at = end.index("</") if KEY in end else len(end)
        at = min((end.index(tag) for tag in special_ids if tag in end), default=at)
        return end[:at], end[at:]

    def _before(self, key: str, special_ids: Mapping[str, int], *, is_string: bool) -> str:
        text = self.key.replace("{is_string}", "true" if is_string else "false")
        if is_string:
            text = text.replace(TYPE, "string")
        return lark_of(text.replace("{key}", key), special_ids)


def is_by_value(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema constrains only the values of its properties, each by itself."""
    required = schema.get("required") or ()
    properties = schema.get("properties") or {}
    is_more = schema.keys() & _NOT_BY_VALUE or '"$ref"' in json.dumps(schema)
    return not is_more and set(required) <= properties.keys()


def _escaped(text: str) -> str:
    escaped: str = regex.escape(text)
    return escaped.replace("/", r"\/")


@cache
def pattern_of(text: str) -> regex.Pattern[str]:
    """Return the pattern of one of a form's texts, with groups for its placeholders."""
    inner = text.rstrip("\n")
    breaks = text.endswith("\n")
    for name in _PATTERNS:
        inner = inner.replace(f"{{{name}}}", f"\0{name}\0")
    pieces = [_PATTERNS.get(piece) or r"\s*".join(map(regex.escape, piece.split("\n"))) for piece in inner.split("\0")]
    return regex.compile("".join(pieces) + (r"(?:\n|(?=[^\n]))" if breaks else ""))


def _texts(choices: Any) -> list[str]:
    """Return the texts among the choices of an enum. Clients pass on other people's schemas, which may be wrong."""
    if isinstance(choices, list):
        return [choice for choice in choices if isinstance(choice, str)]
    return []
