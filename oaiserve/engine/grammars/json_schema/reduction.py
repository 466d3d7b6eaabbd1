"""Leaves out keywords of a prepared schema that llguidance cannot obey, for clients that allow this.

Each of them could be obeyed alone: otherwise it would have been refused before. They fail in combination with others:
patterns of names that overlap in joined schemas, or references that lead back to themselves next to other keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from oaiserve.engine.grammars.json_schema.prepare import PreparedSchema, whole_left_out
from oaiserve.gc_pause import thread_work_ns

MOST_SEARCH_NS = 300_000_000  # CPU time for finding what to leave out

# Keywords that are left out only if leaving out any other one isn't enough, in this order.
_LATER = ("allOf", "anyOf", "$ref", "enum", "const", "items", "required", "properties")
# For each keyword of a prepared schema: the client's keyword that it may come from
_ORIGINS = {
    "anyOf": "oneOf",
    "pattern": "format",
    "minimum": "format",
    "maximum": "format",
    "prefixItems": "items",
    "items": "additionalItems",
    "patternProperties": "propertyNames",
    "additionalProperties": "propertyNames",
}

Schema = dict[str, Any]


class _NotReducible(Exception):
    """The search takes too long, or finds nothing to leave out."""


def reduced(
    schema: PreparedSchema, text: str, error_of: Callable[[Schema], str]
) -> tuple[PreparedSchema, Sequence[str]]:
    """Return a schema that llguidance compiles, and the omitted keywords: "" for all. `text` is the client's schema.
    `error_of` returns llguidance's error for a document, or ""."""
    reduction = _Reduction(schema.document, error_of)
    try:
        document = reduction.run()
    except _NotReducible:
        return whole_left_out(schema.document)
    names = (name if f'"{name}"' in text else _ORIGINS.get(name, "") for name in reduction.left_out)
    return replace(schema, document=document), [*dict.fromkeys(names)]


class _Reduction:
    def __init__(self, document: Schema, error_of: Callable[[Schema], str]) -> None:
        self._definitions: dict[str, Any] = document.get("$defs", {})
        self._root = {keyword: value for keyword, value in document.items() if keyword != "$defs"}
        self._error_of = error_of
        self._until_ns = thread_work_ns() + MOST_SEARCH_NS
        self.left_out: dict[str, None] = {}

    def run(self) -> Schema:
        # A definition counts as true until it is reduced. Each one is first referred to by an earlier one, so the
        # innermost are the last.
        definitions = self._definitions
        self._definitions = dict.fromkeys(definitions, True)
        for name in reversed(definitions):
            self._definitions[name] = definitions[name]
            self._reduce(definitions[name])
        self._reduce(self._root)
        if not self._compiles(self._root):
            raise _NotReducible
        return self._document(self._root)

    def _reduce(self, schema: Any) -> None:
        """Leave out keywords until a schema compiles, starting with the innermost schemas."""
        if not isinstance(schema, dict) or schema.keys() == {"$ref"} or self._compiles(schema):
            return
        for inner in _inner(schema):
            self._reduce(inner)
        if self._compiles(schema):
            return
        for holder, keyword in _candidates(schema):
            before = {**holder}
            del holder[keyword]
            if self._compiles(schema):
                self.left_out[keyword] = None
                return
            holder.clear()
            holder.update(before)
        for keyword in [name for name in schema if name != "type"]:
            self.left_out[keyword] = None
            del schema[keyword]

    def _compiles(self, schema: Schema) -> bool:
        if thread_work_ns() > self._until_ns:
            raise _NotReducible
        return not self._error_of(self._document(schema))

    def _document(self, schema: Schema) -> Schema:
        return {**schema, "$defs": self._definitions} if self._definitions else schema


def _inner(schema: Schema) -> Iterator[Any]:
    """Yield the direct subschemas of a schema."""
    for keyword in ("properties", "patternProperties"):
        yield from schema.get(keyword, {}).values()
    for keyword in ("prefixItems", "allOf", "anyOf"):
        yield from schema.get(keyword, ())
    for keyword in ("additionalProperties", "items"):
        yield schema.get(keyword)


def _candidates(schema: Schema) -> list[tuple[Schema, str]]:
    """Return the keywords of a schema and of those joined with it, the least important ones first."""
    joined = (each for each in chain(schema.get("allOf", ()), schema.get("anyOf", ())) if isinstance(each, dict))
    candidates = [(holder, keyword) for holder in (schema, *joined) for keyword in holder if keyword != "type"]
    return sorted(candidates, key=lambda each: _LATER.index(each[1]) + 1 if each[1] in _LATER else 0)
