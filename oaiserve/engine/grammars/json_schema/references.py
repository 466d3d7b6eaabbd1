"""References of a schema, within its own document. Nothing is ever fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from oaiserve.engine.grammars.json_schema.terms import shown, step
from oaiserve.engine.grammars.refusal import Refused


class SchemaDocument:
    """The whole schema, in which references are looked up."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._anchors = {
            each[keyword]: (each, place)
            for each, place in _objects(root)
            for keyword in ("$anchor", "$dynamicAnchor")
            if isinstance(each.get(keyword), str)
        }
        self._base = root.get("$id") if isinstance(root, dict) else None

    def find(self, reference: str, where: str) -> tuple[Any, str]:
        """Return the target of a reference, and its place."""
        base, _, fragment = reference.partition("#")
        if base and base != str(self._base).rstrip("#"):
            raise Refused(f"{where} refers to {shown(reference)}, outside the schema; nothing is fetched")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise Refused(f"{where} refers to {shown(reference)}, which is not in the schema")
            return self._anchors[fragment]
        found, place = self.root, "$"
        for part in fragment.split("/")[1:]:
            key: Any = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and re.fullmatch("[0-9]{1,6}", key, re.ASCII) and int(key) < len(found):
                key = int(key)
            elif not isinstance(found, dict) or key not in found:
                raise Refused(f"{where} refers to {shown(reference)}, which is not in the schema")
            found, place = found[key], step(place, key)
        return found, place

    def resolved(self, schema: Any) -> Any:
        """Return the target of a schema with a reference, without the keywords beside it."""
        for _ in range(10):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            schema, _ = self.find(schema["$ref"], "$ref")
        return True


def has_reference(schema: Any) -> bool:
    return any("$ref" in each for each, _ in _objects(schema))


def _objects(document: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield all objects of a document, each with its place."""
    waiting = [(document, "$")]
    while waiting:
        each, place = waiting.pop()
        if isinstance(each, dict):
            yield each, place
            waiting += [(inner, step(place, key)) for key, inner in each.items()]
        elif isinstance(each, list):
            waiting += [(inner, step(place, index)) for index, inner in enumerate(each)]
