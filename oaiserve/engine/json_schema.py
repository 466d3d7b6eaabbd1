"""JSON Schemas of clients, checked and prepared for llguidance.

A schema is obeyed or refused, never ignored: every answer is valid under it. What a schema may contain is decided here,
keyword by keyword, so that a refusal names the keyword and its place. llguidance gets a document that holds only what
it is known to obey. What it would take too long over is refused here as well, because compiling cannot be interrupted.

Answers may be narrower than the schema: no white space between tokens, properties in the order of the schema, none
beyond those that are listed unless the schema says something about them, dates that every library accepts.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any
from urllib.parse import unquote

from oaiserve.engine import regexes
from oaiserve.engine.refusal import Refused

MOST_BYTES = 2**18
MOST_SCHEMAS = 8_000  # in a document
MOST_PROPERTIES = 1_000  # of an object
MOST_DEPTH = 50  # schemas within each other; llguidance's reader of JSON stops at 61
MOST_LINKED_DEPTH = 500  # the same through references, of which llguidance follows each once, on the stack
MOST_COMBINED = 5_000  # schemas that are joined with others, by "allOf" or beside "$ref", and so are copied
MOST_JOINED_PATTERNS = 12  # in schemas that are joined with others; to look for a common match takes exponential time
MOST_COMPARED = 20_000  # pairs of schemas in "oneOf"
MOST_ITEMS = 10_000  # of an array with bounds, and of all such arrays together ten times as many
MOST_LENGTH = 2**31 - 1
MOST_FORCED = 2**14  # characters that an answer must have at some place: they are looked at in one go
LARGEST_NUMBER = 2**53  # beyond it, libraries disagree about which number is meant
MOST_MULTIPLE = 65_536

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "id", "$comment", "$defs", "definitions", "$anchor", "$dynamicAnchor", "$vocabulary",
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
        "contentEncoding", "contentMediaType", "contentSchema",
    }
)  # fmt: skip
# What is never obeyed, with the values that demand nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "x-guidance": (),  # llguidance's own, which could tell it to ignore what it cannot obey
}
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# The formats of strings. None: llguidance has the same idea of it.
FORMATS: dict[str, str | None] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": None,
    "uuid": None,
    "email": None,
    "hostname": None,
    "ipv4": None,
    "ipv6": None,
    "uri": None,
    "password": regexes.ANYTHING,
}
# Those of OpenAPI for numbers. Any number of JSON can be stored as a float.
_WIDEST = LARGEST_NUMBER - 1
NUMBER_FORMATS: dict[str, tuple[int, int] | None] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-_WIDEST, _WIDEST),
    "float": None,
    "double": None,
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A schema that llguidance can read."""

    document: dict[str, Any]
    _places: list[tuple[dict[str, Any], str]]

    def parts(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield each part as a document of its own, with its place, the innermost ones first."""
        definitions = self.document.get("$defs", {})
        for part, place in self._places:
            yield {**part, "$defs": definitions}, place


def prepare(text: str) -> Prepared:
    """Read, check and prepare the text of a schema. Raises Refused."""
    if len(text.encode(errors="surrogatepass")) > MOST_BYTES:
        raise Refused(f"the schema has more than {MOST_BYTES} bytes")
    try:
        document = json.loads(text, parse_constant=_no_number)
        json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise Refused(f"the schema has more than {MOST_DEPTH} schemas within each other") from None
    except UnicodeEncodeError:
        raise Refused("the schema has half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise Refused(f"the schema is not valid JSON: {error}") from None
    return _Preparation(document).run()


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


@dataclass(slots=True)
class _Definition:
    """A part of the document that is prepared once, for all references to it."""

    name: str
    schema: Any
    place: str
    is_alone: bool
    prepared: dict[str, Any] | bool = True
    num_schemas: int = 0
    links: list[tuple[int, str]] = field(default_factory=list)  # in order: how deep it is, and the name of its target
    joined: list[str] = field(default_factory=list)  # the targets that are copied into what stands beside them


class _Preparation:
    """The preparation of one document."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._definitions: dict[tuple[int, bool], _Definition] = {}
        self._by_name: dict[str, _Definition] = {}
        self._waiting: deque[_Definition] = deque()
        self._root = self._current = _Definition("", document, "$", True)
        self._places: list[tuple[dict[str, Any], str]] = []
        self._joined_patterns: set[str] = set()
        self._shortest: dict[str, int] = {}  # characters of the shortest match of each pattern
        self._num_schemas = self._num_items = self._num_compared = 0
        self._anchors = dict(_anchors(document))
        self._base = document.get("$id") if isinstance(document, dict) else None

    def run(self) -> Prepared:
        root = self._root
        root.prepared = self._schema(root.schema, "$", 1, True)
        while self._waiting:
            self._current = self._waiting.popleft()
            self._current.prepared = self._schema(self._current.schema, self._current.place, 1, self._current.is_alone)
        if root.prepared is False:
            raise Refused("no answer is valid under the schema, which is false")
        self._check_loops()
        self._check_links()
        self._check_joined()
        document = dict(root.prepared) if isinstance(root.prepared, dict) else {}
        if self._by_name:
            document["$defs"] = {name: definition.prepared for name, definition in self._by_name.items()}
        return Prepared(document, self._places)

    def _schema(self, schema: Any, place: str, depth: int, is_alone: bool) -> dict[str, Any] | bool:
        """Prepare a schema. It is alone if what an instance is held to at its place is this schema and no other."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Refused(f"the schema at {place} must be an object, true or false, got {_kind(schema)}")
        if depth > MOST_DEPTH:
            raise Refused(f"the schema has more than {MOST_DEPTH} schemas within each other, at {place[:200]}...")
        self._num_schemas += 1
        self._current.num_schemas += 1
        if self._num_schemas > MOST_SCHEMAS:
            raise Refused(f"the schema consists of more than {MOST_SCHEMAS} schemas")
        schema = _modern(schema, place)
        self._refuse(schema, place)
        joined = [name for name in _APPLICATORS if name in schema]
        own = [name for name in schema if name in _CHECKED]
        if not own and len(joined) == 1 and isinstance(schema[joined[0]], list) and len(schema[joined[0]]) == 1:
            # A list of one schema is that schema, whatever the list is called.
            return self._schema(schema[joined[0]][0], f"{place}.{joined[0]}[0]", depth + 1, is_alone)
        is_joined = bool(own) + len(joined) > 1 or "allOf" in joined
        is_alone = is_alone and not is_joined
        prepared: dict[str, Any] = {}
        for keyword, value in schema.items():
            where = _step(place, keyword)
            if keyword in _CHECKED:
                prepared[keyword] = _CHECKED[keyword](self, value, where, depth, is_alone)
            elif keyword == "$ref":
                prepared["$ref"] = self._reference(value, where, depth, is_alone, is_joined)
            elif keyword in joined:
                if keyword == "oneOf":
                    self._check_disjoint(value, where)
                members = [
                    self._member(each, _step(where, index), depth, is_alone, is_joined)
                    for index, each in enumerate(_list_of_any(value, where))
                ]
                if keyword == "oneOf" and "anyOf" in schema:
                    prepared.setdefault("allOf", []).append({"anyOf": members})
                elif keyword == "allOf":
                    prepared.setdefault("allOf", []).extend(members)
                else:
                    prepared["anyOf"] = members
        self._finish(prepared, schema, place, is_alone)
        self._places.append((prepared, place))
        return prepared

    def _member(self, schema: Any, place: str, depth: int, is_alone: bool, is_joined: bool) -> dict[str, Any] | bool:
        if is_joined and isinstance(schema, dict) and "$ref" in schema:
            # llguidance replaces a reference that is joined with something by its target.
            return {"$ref": self._reference(schema["$ref"], _step(place, "$ref"), depth, False, True)} | (
                {"allOf": [rest]}
                if (rest := self._schema({k: v for k, v in schema.items() if k != "$ref"}, place, depth + 1, False))
                else {}
            )
        return self._schema(schema, place, depth + 1, is_alone)

    def _refuse(self, schema: dict[str, Any], place: str) -> None:
        for keyword, harmless in REFUSED.items():
            if keyword in schema and schema[keyword] not in harmless:
                raise Refused(f"the keyword '{keyword}' at {_step(place, keyword)} is not supported")
        if "propertyNames" in schema and schema["propertyNames"] not in (True, {}, {"type": "string"}):
            raise Refused(f"the keyword 'propertyNames' at {_step(place, 'propertyNames')} is not supported")
        if str(schema.get("$id", "#"))[:1] != "#" and place != "$" and _has_reference(schema):
            raise Refused(f"the keyword '$id' at {_step(place, '$id')} is not supported around a '$ref'")

    def _finish(self, prepared: dict[str, Any], schema: dict[str, Any], place: str, is_alone: bool) -> None:
        """Check the keywords of a schema against each other, and put those right that depend on others."""
        _keep_values_of_types(prepared, place)
        _make_integers(prepared)
        _check_bounds(prepared, place)
        _apply_format(prepared, place)
        if is_alone and _lists_properties(prepared):
            prepared.setdefault("additionalProperties", False)
        missing = prepared.get("minProperties", 0) - len(set(prepared.get("required", ())))
        if missing > 1:
            # Additional names may come twice, and then count once.
            raise Refused(
                f"the keyword 'minProperties' at {_step(place, 'minProperties')} is not supported where more than one "
                "of the properties is not named in 'required'"
            )

    # The checks of keywords: each returns the value for llguidance.

    def _type(self, value: Any, where: str, *_: Any) -> Any:
        kinds = value if isinstance(value, list) else [value]
        if not kinds:
            raise Refused(f"the list of types at {where} must not be empty")
        for kind in kinds:
            if kind not in TYPES:
                raise Refused(f"the type at {where} must be one of {', '.join(TYPES)}, got {_shown(kind)}")
        return list(dict.fromkeys(kinds)) if isinstance(value, list) else value

    def _properties(self, value: Any, where: str, depth: int, is_alone: bool) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Refused(f"{where} must be an object, got {_kind(value)}")
        if len(value) > MOST_PROPERTIES:
            raise Refused(f"{where} has more than {MOST_PROPERTIES} properties")
        return {name: self._schema(each, _step(where, name), depth + 1, is_alone) for name, each in value.items()}

    def _pattern_properties(self, value: Any, where: str, depth: int, is_alone: bool) -> dict[str, Any]:
        prepared = self._properties(value, where, depth, is_alone)
        translated = {self._pattern(name, _step(where, name), depth, is_alone): each for name, each in prepared.items()}
        if len(translated) < len(prepared):
            raise Refused(f"two patterns of {where} mean the same")
        return translated

    def _subschema(self, value: Any, where: str, depth: int, is_alone: bool) -> Any:
        return self._schema(value, where, depth + 1, is_alone)

    def _list(self, value: Any, where: str, depth: int, is_alone: bool) -> list[Any]:
        members = _list_of_any(value, where)
        return [self._schema(each, _step(where, i), depth + 1, is_alone) for i, each in enumerate(members)]

    def _required(self, value: Any, where: str, *_: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise Refused(f"{where} must be a list of strings")
        return list(dict.fromkeys(value))

    def _enum(self, value: Any, where: str, *_: Any) -> list[Any]:
        for index, each in enumerate(_list_of_any(value, where)):
            self._const(each, _step(where, index))
        return list(value)

    def _const(self, value: Any, where: str, *_: Any) -> Any:
        waiting = [(value, 0)]
        while waiting:
            each, depth = waiting.pop()
            if depth > MOST_DEPTH:
                raise Refused(f"the value at {where} has more than {MOST_DEPTH} values within each other")
            if isinstance(each, int | float) and abs(each) > LARGEST_NUMBER:
                raise Refused(
                    f"the value at {where} has a number beyond {LARGEST_NUMBER}, which no float holds exactly"
                )
            if isinstance(each, dict | list):
                waiting += [(inner, depth + 1) for inner in (each.values() if isinstance(each, dict) else each)]
        return value

    def _number(self, value: Any, where: str, *_: Any) -> Any:
        if not _is_number(value):
            raise Refused(f"{where} must be a number, got {_kind(value)}")
        if abs(value) > LARGEST_NUMBER:
            raise Refused(f"{where} must be a number up to {LARGEST_NUMBER}, which floats hold exactly")
        return value

    def _multiple_of(self, value: Any, where: str, depth: int, is_alone: bool) -> Any:
        self._number(value, where)
        if value <= 0:
            raise Refused(f"{where} must be greater than 0, got {_shown(value)}")
        if value not in (0.5, 0.25) and value != int(value):
            raise Refused(f"{where} must be a whole number, 0.5 or 0.25: libraries disagree about multiples of others")
        most = MOST_MULTIPLE if is_alone else 100
        if value > most:
            raise Refused(f"{where} must be at most {most}{'' if is_alone else ' beside other schemas'}")
        return int(value) if value == int(value) else value

    def _count(self, value: Any, where: str, *_: Any) -> int:
        if not _is_number(value) or value != int(value) or not 0 <= value <= MOST_LENGTH:
            raise Refused(f"{where} must be an integer from 0 to {MOST_LENGTH}, got {_shown(value)}")
        return int(value)

    def _count_items(self, value: Any, where: str, *_: Any) -> int:
        count = self._count(value, where)
        self._num_items += count
        if count > MOST_ITEMS or self._num_items > 10 * MOST_ITEMS:
            raise Refused(
                f"{where} is too large: bounds of arrays may be up to {MOST_ITEMS}, and ten times that in all"
            )
        return count

    def _pattern(self, value: Any, where: str, depth: int, is_alone: bool) -> str:
        if not isinstance(value, str):
            raise Refused(f"{where} must be a string, got {_kind(value)}")
        try:
            regex = regexes.search(value)
        except Refused as refused:
            raise Refused(f"the pattern at {where} {refused.reason}") from None
        anchored = f"^{regex.text}$"
        self._shortest[anchored] = regex.least
        if not is_alone:
            self._joined_patterns.add(anchored)
        if len(self._joined_patterns) > MOST_JOINED_PATTERNS:
            raise Refused(
                f"the pattern at {where} is one of more than {MOST_JOINED_PATTERNS} that are joined with others"
            )
        return anchored

    def _format(self, value: Any, where: str, *_: Any) -> str:
        if not isinstance(value, str):
            raise Refused(f"{where} must be a string, got {_kind(value)}")
        return value

    # References.

    def _reference(self, value: Any, where: str, depth: int, is_alone: bool, is_joined: bool) -> str:
        if not isinstance(value, str):
            raise Refused(f"{where} must be a string, got {_kind(value)}")
        target, place = self._find(value, where)
        if not isinstance(target, dict | bool):
            raise Refused(f"{where} refers to {_shown(value)}, which is no schema but {_kind(target)}")
        # All true schemas are the same object, and so are all false ones.
        definition = self._definitions.get((id(target), is_alone))
        if definition is None:
            name = f"r{len(self._by_name)}"
            definition = _Definition(name, target, place, is_alone)
            self._definitions[id(target), is_alone] = self._by_name[name] = definition
            self._waiting.append(definition)
        self._current.links.append((depth, definition.name))
        if is_joined:
            self._current.joined.append(definition.name)
        return f"#/$defs/{definition.name}"

    def _find(self, reference: str, where: str) -> tuple[Any, str]:
        """Return what a reference refers to, and its place."""
        base, _, fragment = reference.partition("#")
        if base and base != str(self._base).rstrip("#"):
            raise Refused(f"{where} refers to {_shown(reference)}, outside the schema; nothing is fetched")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise Refused(f"{where} refers to {_shown(reference)}, which is not in the schema")
            return self._anchors[fragment]
        found, place = self._document, "$"
        for part in fragment.split("/")[1:]:
            key: Any = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and re.fullmatch("[0-9]{1,6}", key, re.ASCII) and int(key) < len(found):
                key = int(key)
            elif not isinstance(found, dict) or key not in found:
                raise Refused(f"{where} refers to {_shown(reference)}, which is not in the schema")
            found, place = found[key], _step(place, key)
        return found, place

    def _check_loops(self) -> None:
        """Refuse a schema that refers to itself for the same instance, or for one within, without an end."""
        for each in self._never(lambda each, done: all(name in done for name in _same_instance(each.prepared))):
            raise Refused(f"the schema at {each.place} refers to itself for the same value")
        least: dict[str, float] = {}  # the characters of the shortest instance of each definition

        def can_end(each: _Definition, done: set[str]) -> bool:
            least[each.name] = self._least(each.prepared, least)
            return least[each.name] < inf

        for each in self._never(can_end):
            raise Refused(f"the schema at {each.place} refers to itself without an end")
        for part, place in self._places:
            if self._least(part, least) > MOST_FORCED:
                raise Refused(f"a value that is valid at {place} must have more than {MOST_FORCED} characters")

    def _least(self, prepared: Any, least: dict[str, float], around: frozenset[str] = frozenset(TYPES)) -> float:
        """Return how many characters an instance has at least, from the same of the definitions; inf: it never ends.

        The instance is of a type in `around`.
        """
        if not isinstance(prepared, dict):
            return 1
        kinds = around & self._possible(prepared)
        found: list[float] = [1]
        if "$ref" in prepared:
            found.append(least.get(prepared["$ref"].removeprefix("#/$defs/"), inf))
        found += [self._least(each, least, kinds) for each in prepared.get("allOf", ())]
        if "anyOf" in prepared:
            found.append(min(self._least(each, least) for each in prepared["anyOf"]))
        if "const" in prepared or "enum" in prepared:
            values = prepared["enum"] if "enum" in prepared else [prepared["const"]]
            found.append(min(len(json.dumps(value, ensure_ascii=False)) for value in values))
        match sorted(kinds):
            case ["object"]:
                listed = prepared.get("properties", {})
                found.append(sum(len(n) + self._least(listed.get(n), least) for n in prepared.get("required", ())))
            case ["array"]:
                first, num = prepared.get("prefixItems", []), prepared.get("minItems", 0)
                more = num - len(first)
                found.append(sum(self._least(each, least) for each in first[:num]))
                if more > 0:
                    found[-1] += more * self._least(prepared.get("items"), least)
            case ["string"]:
                found.append(max(prepared.get("minLength", 0), self._shortest.get(prepared.get("pattern", ""), 0)))
        return max(found)

    def _possible(self, prepared: Any) -> frozenset[str]:
        """Return the types that an instance may have, or more of them."""
        if not isinstance(prepared, dict):
            return frozenset(TYPES)
        possible = frozenset(_kinds(prepared))
        for each in prepared.get("allOf", ()):
            possible &= self._possible(each)
        if "$ref" in prepared:
            possible &= self._possible(self._by_name[prepared["$ref"].removeprefix("#/$defs/")].prepared)
        if "anyOf" in prepared:
            possible &= frozenset[str]().union(*map(self._possible, prepared["anyOf"]))
        return possible

    def _check_links(self) -> None:
        """Refuse what would take llguidance too deep: it goes into a reference where it first meets it."""
        depths: dict[str, int] = {}  # of what is below a definition, at most

        def is_known(each: _Definition, done: set[str]) -> bool:
            if any(name not in done for _, name in each.links):
                return False
            depths[each.name] = max((inner + depths[name] for inner, name in each.links), default=0)
            return True

        # Those that lead back to each other: each of them is gone into once.
        loops = sum(max(inner for inner, _ in each.links) for each in self._never(is_known))
        if loops + max(depths.values(), default=0) > MOST_LINKED_DEPTH:
            raise Refused(f"the schema has more than {MOST_LINKED_DEPTH} schemas within each other, through '$ref'")

    def _never(self, is_done: Callable[[_Definition, set[str]], bool]) -> list[_Definition]:
        """Return the definitions that are never done, as each may depend on those that were done before."""
        done: set[str] = set()
        left = [self._root, *self._by_name.values()]
        while True:
            waiting, left = left[::-1], []  # forwards and backwards, so that a chain takes few rounds
            for each in waiting:
                if is_done(each, done):
                    done.add(each.name)
                else:
                    left.append(each)
            if len(left) == len(waiting):
                return left

    def _check_joined(self) -> None:
        """Refuse what would become too large when references that are joined with something are replaced."""
        sizes: dict[str, int] = {}
        total = 0
        for definition in [self._root, *self._by_name.values()]:
            if definition.joined:
                total += self._joined_size(definition, sizes, ())
            if total > MOST_COMBINED:
                raise Refused(
                    f"the schema joins more than {MOST_COMBINED} schemas with others, by 'allOf' or beside '$ref', "
                    f"at {definition.place}"
                )

        for part, place in self._places:
            if self._num_options(part) > MOST_COMBINED:
                raise Refused(f"the schema at {place} joins unions that come to more than {MOST_COMBINED} combinations")

    def _num_options(self, prepared: Any) -> int:
        """Return how many alternatives a schema has, where each of one union is joined with each of another."""
        if not isinstance(prepared, dict):
            return 1
        num = len(prepared.get("enum", (None,)))
        if "$ref" in prepared and len(prepared) > 1:
            num *= self._num_options(self._by_name[prepared["$ref"].removeprefix("#/$defs/")].prepared)
        if "anyOf" in prepared:
            num *= sum(map(self._num_options, prepared["anyOf"]))
        for each in prepared.get("allOf", ()):
            is_reference = isinstance(each, dict) and "$ref" in each
            num *= self._num_options({**each, "title": ""} if is_reference else each)
        return num

    def _joined_size(self, definition: _Definition, sizes: dict[str, int], around: tuple[str, ...]) -> int:
        if definition.name in around or len(around) > MOST_LINKED_DEPTH:
            raise Refused(f"a '$ref' at {definition.place} leads back to itself, by 'allOf' or beside other keywords")
        if definition.name not in sizes:
            size = definition.num_schemas
            for name in definition.joined:
                size += self._joined_size(self._by_name[name], sizes, (*around, definition.name))
            sizes[definition.name] = min(size, MOST_COMBINED + 1)
        return sizes[definition.name]

    # "oneOf" is "anyOf" if no instance can be valid under two of the schemas.

    def _check_disjoint(self, value: Any, where: str) -> None:
        members = _list_of_any(value, where)
        for i, one in enumerate(members):
            for j in range(i):
                if not self._are_disjoint(members[j], one, where, 0):
                    raise Refused(
                        f"the keyword 'oneOf' at {where} is only supported where its schemas exclude each other, by "
                        f"type, 'const' or 'enum', or by those of a required property; {j} and {i} may both hold"
                    )

    def _are_disjoint(self, one: Any, other: Any, where: str, depth: int) -> bool:
        """Return whether certainly no instance is valid under both."""
        self._num_compared += 1
        if self._num_compared > MOST_COMPARED:
            raise Refused(
                f"the keyword 'oneOf' at {where} has too many schemas to tell whether they exclude each other"
            )
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth > MOST_DEPTH // 10:
            return False
        for first, second in ((one, other), (other, one)):
            for name in ("anyOf", "oneOf"):
                if isinstance(first.get(name), list) and first[name]:
                    return all(self._are_disjoint(each, second, where, depth + 1) for each in first[name])
        values, other_values = _values(one), _values(other)
        if values is not None and other_values is not None:
            return not values & other_values
        kinds, other_kinds = _kinds(one), _kinds(other)
        if not kinds & other_kinds:
            return True
        if kinds & other_kinds != {"object"}:
            return False
        return any(
            self._are_disjoint(_property(one, name), _property(other, name), where, depth + 1)
            for name in {*_names(one, "required"), *_names(other, "required")}
        )

    def _resolved(self, schema: Any) -> Any:
        for _ in range(10):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            schema, _ = self._find(schema["$ref"], "$ref")
        return True


# The keywords that are obeyed, but for "$ref", "allOf", "anyOf" and "oneOf", which join schemas.
_CHECKED: dict[str, Any] = {
    "type": _Preparation._type,
    "enum": _Preparation._enum,
    "const": _Preparation._const,
    "properties": _Preparation._properties,
    "patternProperties": _Preparation._pattern_properties,
    "additionalProperties": _Preparation._subschema,
    "required": _Preparation._required,
    "minProperties": _Preparation._count,
    "maxProperties": _Preparation._count,
    "items": _Preparation._subschema,
    "prefixItems": _Preparation._list,
    "minItems": _Preparation._count_items,
    "maxItems": _Preparation._count_items,
    "minimum": _Preparation._number,
    "maximum": _Preparation._number,
    "exclusiveMinimum": _Preparation._number,
    "exclusiveMaximum": _Preparation._number,
    "multipleOf": _Preparation._multiple_of,
    "minLength": _Preparation._count,
    "maxLength": _Preparation._count,
    "pattern": _Preparation._pattern,
    "format": _Preparation._format,
}


def _modern(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a schema of an older draft in the words of 2020-12."""
    changed = dict(schema)
    for limit in ("Minimum", "Maximum"):
        exclusive, plain = f"exclusive{limit}", limit.lower()
        if isinstance(schema.get(exclusive), bool):  # draft 4
            del changed[exclusive]
            if schema[exclusive] and plain in schema:
                changed[exclusive] = changed.pop(plain)
    if isinstance(schema.get("items"), list):  # before 2020-12
        if "prefixItems" in schema:
            raise Refused(f"the keyword 'items' at {_step(place, 'items')} must not be a list beside 'prefixItems'")
        changed = {("prefixItems" if name == "items" else name): value for name, value in changed.items()}
        if "additionalItems" in schema:
            changed["items"] = schema["additionalItems"]
        if not changed["prefixItems"]:
            del changed["prefixItems"]
    return changed


def _keep_values_of_types(prepared: dict[str, Any], place: str) -> None:
    """Drop the values of "enum" that are of another type. llguidance gets no type beside values."""
    if "enum" not in prepared and "const" not in prepared:
        return
    name = "enum" if "enum" in prepared else "const"
    kinds = _kinds({"type": prepared.pop("type")} if "type" in prepared else {})
    values = prepared["enum"] if name == "enum" else [prepared["const"]]
    kept = [value for value in values if _is_of(value, kinds)]
    if not kept:
        raise Refused(f"no value of {_step(place, name)} is of the type at {_step(place, 'type')}")
    if name == "enum":
        prepared["enum"] = kept


def _make_integers(prepared: dict[str, Any]) -> None:
    """Say that multiples of integers are integers, so that it is known when a number is complete."""
    if isinstance(prepared.get("multipleOf"), int):
        kinds = prepared.get("type", list(TYPES))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        prepared["type"] = list(dict.fromkeys("integer" if kind == "number" else kind for kind in kinds))


def _check_bounds(prepared: dict[str, Any], place: str) -> None:
    for low, high in (
        ("minimum", "maximum"),
        ("minLength", "maxLength"),
        ("minItems", "maxItems"),
        ("minProperties", "maxProperties"),
    ):
        if low in prepared and high in prepared and prepared[low] > prepared[high]:
            raise Refused(
                f"{_step(place, low)} must not be greater than '{high}', "
                f"got {_shown(prepared[low])} and {_shown(prepared[high])}"
            )
    for low, high in (("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum",) * 2):
        high = "exclusiveMaximum" if low == high else high
        if low in prepared and high in prepared and prepared[low] >= prepared[high]:
            raise Refused(
                f"{_step(place, low)} must be less than '{high}', "
                f"got {_shown(prepared[low])} and {_shown(prepared[high])}"
            )


def _apply_format(prepared: dict[str, Any], place: str) -> None:
    if "format" not in prepared:
        return
    name, kinds = prepared["format"], _kinds(prepared)
    if "string" not in kinds and name in NUMBER_FORMATS:
        del prepared["format"]
        if bounds := NUMBER_FORMATS[name]:
            prepared["minimum"] = max(bounds[0], prepared.get("minimum", bounds[0]))
            prepared["maximum"] = min(bounds[1], prepared.get("maximum", bounds[1]))
    elif name not in FORMATS:
        known = ", ".join(FORMATS)
        raise Refused(f"the format at {_step(place, 'format')} must be one of {known}, got {_shown(name)}")
    elif (pattern := FORMATS[name]) is not None:
        del prepared["format"]
        if "pattern" in prepared:
            prepared.setdefault("allOf", []).append({"pattern": f"^{pattern}$"})
        else:
            prepared["pattern"] = f"^{pattern}$"
    elif name == "hostname":
        prepared["maxLength"] = min(253, prepared.get("maxLength", 253))


def _same_instance(prepared: Any) -> Iterator[str]:
    """Yield the names of the definitions that an instance of the schema itself is held to."""
    if isinstance(prepared, dict):
        if "$ref" in prepared:
            yield prepared["$ref"].removeprefix("#/$defs/")
        for each in (*prepared.get("allOf", ()), *prepared.get("anyOf", ())):
            yield from _same_instance(each)


def _lists_properties(prepared: dict[str, Any]) -> bool:
    """Return whether a schema lists the properties of an object, and needs no others."""
    listed = prepared.get("properties", {})
    return (
        bool(listed or prepared.get("patternProperties"))
        and all(name in listed for name in prepared.get("required", ()))
        and prepared.get("minProperties", 0) <= len(listed)
    )


def _list_of_any(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise Refused(f"{where} must be a list that is not empty, got {'[]' if value == [] else _kind(value)}")
    return value


def _step(place: str, key: str | int) -> str:
    """Return the place of what stands under a key, as in $.properties.a.items[0]."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    if re.fullmatch(r"[A-Za-z_$][A-Za-z0-9_$-]{0,60}", key, re.ASCII):
        return f"{place}.{key}"
    return f"{place}[{json.dumps(key if len(key) <= 60 else key[:60] + '...', ensure_ascii=False)}]"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of(value: Any, kinds: set[str]) -> bool:
    if _is_number(value):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names[type(value)] in kinds


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the types that an instance may have. Every integer is a number, too."""
    if (values := _values(schema)) is not None:
        return {kind for value in values for kind in _kinds_of(json.loads(value))}
    kinds = schema.get("type", list(TYPES))
    found = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    return found | ({"integer"} if "number" in found else set())


def _kinds_of(value: Any) -> set[str]:
    return {kind for kind in TYPES if _is_of(value, {kind})}


def _values(schema: dict[str, Any]) -> set[str] | None:
    """Return the only values that a schema allows, each in one spelling; None if there may be others."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(_plain(value), sort_keys=True) for value in values}


def _plain(value: Any) -> Any:
    """Return a value in which 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def _property(schema: dict[str, Any], name: str) -> Any:
    """Return a schema that a property must be valid under. There may be others."""
    listed = schema.get("properties")
    if isinstance(listed, dict) and name in listed:
        return listed[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _names(schema: dict[str, Any], keyword: str) -> list[str]:
    names = schema.get(keyword)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _has_reference(schema: Any) -> bool:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if "$ref" in each:
                return True
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return False


def _anchors(document: Any) -> Iterator[tuple[str, tuple[Any, str]]]:
    waiting = [(document, "$")]
    while waiting:
        each, place = waiting.pop()
        if isinstance(each, dict):
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(each.get(keyword), str):
                    yield each[keyword], (each, place)
            waiting += [(inner, _step(place, key)) for key, inner in each.items()]
        elif isinstance(each, list):
            waiting += [(inner, _step(place, index)) for index, inner in enumerate(each)]
