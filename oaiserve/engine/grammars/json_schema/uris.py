"""Resolves references by URI: those to a part of the same document become JSON Pointers. Nothing is ever fetched."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote, urljoin

from oaiserve.engine.grammars.refusal import Refused

MOST_URI = 1000  # characters: each anchor of a schema has the URI before it
# Keywords whose values map names to schemas, and keywords whose values aren't schemas.
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "default", "examples"}
_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")

_Path = tuple[Any, str | int] | None  # (path of the parent, key); None: the root


def names_parts(each: dict[str, Any]) -> bool:
    """Return whether an object may give a URI or an anchor to a part of its document."""
    return not each.keys().isdisjoint(_NAMES) and any(isinstance(each.get(name), str) for name in _NAMES)


def resolve(root: Any) -> None:
    """Replace references to named parts of a document, in place, by pointers from its root. A reference that leads
    elsewhere gets its whole URI. Raises Refused."""
    keyword = "id" if isinstance(root, dict) and "draft-04" in str(root.get("$schema")) else "$id"
    targets: dict[str, _Path] = {"": None}
    references: list[tuple[dict[str, Any], str]] = []  # schemas with their base URIs
    waiting: list[tuple[Any, str, _Path, bool]] = [(root, "", None, False)]
    while waiting:
        each, base, path, is_map = waiting.pop()
        if isinstance(each, list):
            waiting += [(value, base, (path, index), False) for index, value in enumerate(each)]
        if not isinstance(each, dict):
            continue
        uri = each.get(keyword)
        if isinstance(uri, str) and uri.startswith("#"):  # an anchor, before 2019-09
            targets.setdefault(base + uri, path)
        elif isinstance(uri, str):
            base = _joined(base, uri.partition("#")[0])
            targets.setdefault(base, path)
        for anchor in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := each.get(anchor), str):
                targets.setdefault(f"{base}#{name}", path)
        if isinstance(each.get("$ref"), str):
            references.append((each, base))
        for name, value in each.items():
            if is_map or name not in _VALUES:
                waiting.append((value, base, (path, name), name in _MAPS and not is_map))
    for schema, base in references:
        before, _, fragment = schema["$ref"].partition("#")
        if not before and keyword == "id":
            continue  # Draft 4's ids of parts are mostly labels, and pointers begin at the root anyway.
        uri = _joined(base, before)
        is_pointer = not fragment or fragment.startswith("/")
        target = uri if is_pointer else f"{uri}#{unquote(fragment)}"
        if target in targets:
            schema["$ref"] = f"#{_pointer(targets[target])}{fragment if is_pointer else ''}"
        elif uri:
            schema["$ref"] = f"{uri}#{fragment}" if fragment else uri


def _joined(base: str, uri: str) -> str:
    if not uri:
        return base
    try:
        joined = urljoin(base, uri)
    except ValueError:  # not a URI
        joined = uri
    if len(joined) > MOST_URI:
        raise Refused(f"a URI in the schema has more than {MOST_URI} characters: {joined[:60]}...")
    return joined


def _pointer(path: _Path) -> str:
    keys = []
    while path is not None:
        path, key = path
        keys.append(quote(str(key).replace("~", "~0").replace("/", "~1"), safe="~"))
    return "".join(f"/{key}" for key in reversed(keys))
