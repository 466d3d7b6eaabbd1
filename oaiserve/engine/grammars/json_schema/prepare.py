"""JSON Schemas of clients, checked and prepared for llguidance.

A schema is obeyed or refused, never ignored: every answer is valid under it. The supported keywords are decided here,
one by one, so that a refusal names the keyword and its place. Names undefined in JSON Schema are annotations, and are
left out like all annotations. llguidance gets a document with only the keywords that are known to be obeyed.

Answers may be narrower than the schema: one blank after each separator and no other white space if names are listed,
properties in the order of the schema, others only where the schema mentions them, and only dates that every library
accepts.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from time import thread_time_ns
from typing import Any

import regex

from oaiserve.engine.grammars import regexes
from oaiserve.engine.grammars.json_schema.conditions import with_evaluated, without_conditions
from oaiserve.engine.grammars.json_schema.exclusion import Exclusion
from oaiserve.engine.grammars.json_schema.known_patterns import without_look_around
from oaiserve.engine.grammars.json_schema.limits import Definition, SchemaLimits
from oaiserve.engine.grammars.json_schema.rewrite import finish, modern
from oaiserve.engine.grammars.json_schema.terms import (
    LARGEST_NUMBER,
    TYPES,
    SchemaDocument,
    checked_string,
    filled_list,
    is_large,
    is_number,
    is_written_exactly,
    kind_of,
    shown,
    step,
)
from oaiserve.engine.grammars.refusal import Contradiction, Refused
from oaiserve.gc_pause import paused_for

MOST_BYTES = 2**18
MOST_SCHEMAS = 8_000  # maximum schemas in a document
MOST_PROPERTIES = 1_000  # properties of an object
MOST_DEPTH = 50  # nesting depth of schemas; llguidance's JSON reader stops at 61
MOST_JOINED_PATTERNS = 12  # in schemas that are joined with others; finding a common match takes exponential time
MOST_MATCH_NS = 20_000_000  # CPU time for finding which names match patterns
MOST_ITEMS = 10_000  # items of an array with bounds; all such arrays together may have ten times as many
MOST_LENGTH = 2**31 - 1
MOST_MULTIPLE = 65_536
MOST_PLACES = 6  # decimal places of a "multipleOf"

# Unsupported keywords, with the values that require nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),  # No automaton remembers items.
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "x-guidance": (),  # llguidance's own, which could make it ignore keywords
}
_CODE_POINT = re.compile(r"\\u\{([0-9a-f]+)\}")
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
_STRING = ("type", "string")


@dataclass(frozen=True, slots=True)
class PreparedSchema:
    document: dict[str, Any]
    _places: list[tuple[dict[str, Any], str]]
    has_large_numbers: bool = False  # "enum" or "const" has numbers that llguidance would change.

    def subschemas(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield each subschema as a separate document, with its path, innermost first."""
        definitions = self.document.get("$defs", {})
        for part, place in self._places:
            yield {**part, "$defs": definitions}, place


def prepare(text: str) -> PreparedSchema:
    """Read, check and prepare the text of a schema. Raises Refused."""
    return _Preparation(_read(text), None).run()


def prepare_leniently(text: str, *, is_open: bool = False) -> tuple[PreparedSchema, Sequence[str]]:
    """Prepare a schema, but leave out keywords that can't be obeyed. Return them as well, or [""] if that is the whole
    schema.

    If `is_open`, objects may have all properties that the schema permits. Otherwise, objects with listed properties
    have no others unless the schema mentions them.
    """
    left_out: dict[str, None] = {}
    document: Any = None
    try:
        document = _read(text)
        return _Preparation(document, left_out, is_open=is_open).run(), [*left_out]
    except Refused:
        return whole_left_out(document)


def whole_left_out(document: Any) -> tuple[PreparedSchema, Sequence[str]]:
    """Return the result of `prepare_leniently` for a schema of which only the type can be obeyed."""
    is_array = isinstance(document, dict) and document.get("type") == "array"
    return PreparedSchema({"type": "array" if is_array else "object"}, []), [""]


def _read(text: str) -> Any:
    if len(text.encode(errors="surrogatepass")) > MOST_BYTES:
        raise Refused(f"the schema has more than {MOST_BYTES} bytes")
    try:
        with paused_for(len(text)):
            document = json.loads(text, parse_constant=_no_number)
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise Refused(f"the schema has more than {MOST_DEPTH} schemas within each other") from None
    except UnicodeEncodeError:
        raise Refused("the schema has half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise Refused(f"the schema is not valid JSON: {error}") from None
    return document


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


class _Preparation:
    def __init__(self, document: Any, left_out: dict[str, None] | None, *, is_open: bool = False) -> None:
        """With `left_out`, keywords that cannot be obeyed are omitted and added to it. Otherwise they are refused."""
        self._left_out = left_out
        self._is_open = is_open
        self._document = SchemaDocument(document)
        self._exclusion = Exclusion(self._document, is_lenient=left_out is not None)
        self._definitions: dict[tuple[int, bool], Definition] = {}
        self._by_name: dict[str, Definition] = {}
        self._waiting: deque[Definition] = deque()
        self._root = self._current = Definition("", document, "$", True)
        self._places: list[tuple[dict[str, Any], str]] = []
        self._joined_patterns: set[str] = set()
        self._contradictions: dict[str, Contradiction] = {}  # keyed by the place of the contradictory schema
        self._shortest: dict[str, int] = {}  # characters of the shortest match of each pattern
        self._num_schemas = self._num_items = 0
        self._has_large_numbers = False
        self._match_ns = 0  # time spent on matching names with patterns

    def run(self) -> PreparedSchema:
        """Prepare the document. Raises Refused."""
        try:
            return self._run()
        except RecursionError:
            raise Refused("the schema has too many schemas within each other") from None

    def _run(self) -> PreparedSchema:
        root = self._root
        root.prepared = self._schema(root.schema, "$", 1, True)
        while self._waiting:
            self._current = self._waiting.popleft()
            self._current.prepared = self._schema(self._current.schema, self._current.place, 1, self._current.is_alone)
        if root.prepared is False:
            raise Refused("no answer is valid under the schema, which is false")
        SchemaLimits(root, self._by_name, self._places, self._shortest).check()
        if isinstance(root.prepared, dict):
            document = dict(root.prepared)
        else:
            document = {}
        if self._by_name:
            document["$defs"] = {name: definition.prepared for name, definition in self._by_name.items()}
        return PreparedSchema(document, self._places, self._has_large_numbers)

    def _schema(self, schema: Any, place: str, depth: int, is_alone: bool) -> dict[str, Any] | bool:
        """Prepare a schema. It is alone if no other schema applies to the same instance."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict) and self._leaves_out("type"):
            return True
        if not isinstance(schema, dict):
            raise Refused(f"the schema at {place} must be an object, true or false, got {kind_of(schema)}")
        if depth > MOST_DEPTH:
            raise Refused(f"the schema has more than {MOST_DEPTH} schemas within each other, at {place[:200]}...")
        self._num_schemas += 1
        self._current.num_schemas += 1
        if self._num_schemas > MOST_SCHEMAS:
            raise Refused(f"the schema consists of more than {MOST_SCHEMAS} schemas")
        # A lenient schema gets no alternatives instead of these keywords: they would fix the order of properties.
        schema = without_conditions(schema) if self._left_out is None else with_evaluated(schema)
        schema = self._without_refused(schema, place)
        for keyword, rewritten in (
            ("items", modern),
            ("propertyNames", self._with_names),
            ("patternProperties", self._with_patterns),
        ):
            try:
                schema = rewritten(schema, place)
            except Refused:
                if not self._leaves_out(keyword):
                    raise
                schema = {name: value for name, value in schema.items() if name != keyword}
        joined = [name for name in _APPLICATORS if name in schema]
        own = [name for name in schema if name in _CHECKED]
        if not own and len(joined) == 1 and isinstance(schema[joined[0]], list) and len(schema[joined[0]]) == 1:
            # A list of one schema is equivalent to that schema, whatever the keyword.
            return self._schema(schema[joined[0]][0], f"{place}.{joined[0]}[0]", depth + 1, is_alone)
        is_joined = bool(own) + len(joined) > 1 or "allOf" in joined
        is_alone = is_alone and not is_joined
        prepared: dict[str, Any] = {}
        for keyword, value in schema.items():
            where = step(place, keyword)
            try:
                if keyword in _CHECKED:
                    prepared[keyword] = _CHECKED[keyword](self, value, where, depth, is_alone)
                elif keyword == "$ref":
                    prepared["$ref"] = self._reference(value, where, depth, is_alone, is_joined)
                elif keyword in joined:
                    members = self._members(keyword, value, where, depth, is_alone, is_joined)
                    if keyword == "oneOf" and "anyOf" in schema:
                        prepared.setdefault("allOf", []).append({"anyOf": members})
                    elif keyword == "allOf":
                        prepared.setdefault("allOf", []).extend(members)
                    else:
                        prepared["anyOf"] = members
            except Refused:
                if not self._leaves_out(keyword):
                    raise
        self._drop_impossible(prepared)
        self._check_required(prepared, place)
        self._finish(prepared, place, is_alone)
        self._places.append((prepared, place))
        return prepared

    def _members(
        self, keyword: str, value: Any, where: str, depth: int, is_alone: bool, is_joined: bool
    ) -> list[dict[str, Any] | bool]:
        try:
            if keyword == "oneOf":
                value = self._exclusion.separated(value, where)
        except Refused:
            if not self._leaves_out(keyword):
                raise
        members: list[dict[str, Any] | bool] = []
        before = most = self._joined_patterns
        for index, each in enumerate(filled_list(value, where)):
            if keyword != "allOf":
                self._joined_patterns = set(before)  # Patterns of alternatives are not joined with each other.
            try:
                members.append(self._member(each, step(where, index), depth, is_alone, is_joined))
            except Contradiction:
                if keyword == "allOf":
                    raise
                members.append(False)
            most = max(most, self._joined_patterns, key=len)
        self._joined_patterns = most
        if all(member is False for member in members):
            raise Contradiction(f"no value is valid under a schema of {where}", keyword)
        return members

    def _drop_impossible(self, prepared: dict[str, Any]) -> None:
        """Drop required names that no object can have, if keywords may be left out."""
        listed = prepared.get("properties", {})
        required = prepared.get("required", [])
        others = bool(prepared.get("patternProperties")) or prepared.get("additionalProperties") is not False
        possible = [name for name in required if listed.get(name, others) is not False]
        if len(possible) < len(required) and self._leaves_out("required"):
            prepared["required"] = possible

    def _check_required(self, prepared: dict[str, Any], place: str) -> None:
        """Raise the error of the first required property whose keywords contradict each other."""
        if not self._contradictions:
            return
        properties = step(place, "properties")
        for name in prepared.get("required", ()):
            if contradiction := self._contradictions.get(step(properties, name)):
                raise contradiction

    def _finish(self, prepared: dict[str, Any], place: str, is_alone: bool) -> None:
        stated = dict(prepared)
        try:
            finish(prepared, place, closes=is_alone and not self._is_open)
        except Refused as refused:
            if not self._leaves_out(refused.keyword):
                raise
            del stated[refused.keyword]
            prepared.clear()
            prepared.update(stated)
            self._finish(prepared, place, is_alone)

    def _leaves_out(self, keyword: str) -> bool:
        """Return whether a keyword is left out rather than refused, and note it."""
        if self._left_out is None:
            return False
        self._left_out[keyword] = None
        return True

    def _member(self, schema: Any, place: str, depth: int, is_alone: bool, is_joined: bool) -> dict[str, Any] | bool:
        if is_joined and isinstance(schema, dict) and "$ref" in schema:
            # llguidance replaces a reference by its target if it is joined with something.
            member: dict[str, Any] = {"$ref": self._reference(schema["$ref"], step(place, "$ref"), depth, False, True)}
            rest = self._schema({key: value for key, value in schema.items() if key != "$ref"}, place, depth + 1, False)
            if rest:
                member["allOf"] = [rest]
            return member
        return self._schema(schema, place, depth + 1, is_alone)

    def _with_names(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Return a schema without "propertyNames": listed names become "properties", and a pattern becomes a
        "patternProperties"."""
        if "propertyNames" not in schema:
            return schema
        names = self._document.resolved(schema["propertyNames"])
        if isinstance(names, dict):  # Annotations and `"type": "string"`, which any name satisfies, don't count.
            known = {*_CHECKED, *REFUSED, *_APPLICATORS, "propertyNames"}
            names = {name: value for name, value in names.items() if name in known and (name, value) != _STRING}
        others = {name: value for name, value in schema.items() if name != "propertyNames"}
        if names in (True, {}):
            return others
        if isinstance(names, dict) and not schema.keys() & {"properties", "patternProperties"}:
            value = schema.get("additionalProperties", True)
            match names:
                case {"enum": [*listed]} if len(names) == 1 and all(isinstance(name, str) for name in listed):
                    return {**others, "properties": dict.fromkeys(listed, value), "additionalProperties": False}
                case {"pattern": str(pattern)} if len(names) == 1:
                    return {**others, "patternProperties": {pattern: value}, "additionalProperties": False}
        raise Refused(
            f"the keyword 'propertyNames' at {step(place, 'propertyNames')} is only supported with an 'enum' or a "
            "'pattern', where there are no 'properties'"
        )

    def _with_patterns(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Return a schema in which each named property also obeys the schemas of the patterns that its name matches."""
        listed = schema.get("properties", {})
        required = schema.get("required", [])
        patterns = schema.get("patternProperties")
        if not isinstance(patterns, dict) or not isinstance(listed, dict) or not isinstance(required, list):
            return schema
        changed = dict(listed)
        names = dict.fromkeys([*listed, *(name for name in required if isinstance(name, str))])
        where = step(place, "patternProperties")
        for pattern, each in patterns.items():
            anchored = self._pattern(pattern, step(where, pattern), 0, True)
            spelled = _CODE_POINT.sub(lambda match: rf"\U{int(match[1], 16):08x}", anchored)
            for name in names:
                if self._matches(spelled, name, where):
                    changed[name] = {"allOf": [changed[name], each]} if name in changed else each
        return {**schema, "properties": changed} if changed != listed else schema

    def _matches(self, pattern: str, name: str, where: str) -> bool:
        """Return whether a pattern matches a name. Raises Refused if that takes too long."""
        began_ns = thread_time_ns()
        try:
            if self._match_ns > MOST_MATCH_NS:
                raise TimeoutError
            return regex.fullmatch(pattern, name, timeout=MOST_MATCH_NS / 1e9) is not None
        except TimeoutError:
            raise Refused(f"to tell which names match the patterns of {where} takes too long") from None
        finally:
            self._match_ns += thread_time_ns() - began_ns

    def _without_refused(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        for keyword, harmless in REFUSED.items():
            if keyword in schema and schema[keyword] not in harmless:
                if not self._leaves_out(keyword):
                    raise Refused(f"the keyword '{keyword}' at {step(place, keyword)} is not supported")
                schema = {name: value for name, value in schema.items() if name != keyword}
        return schema

    # The checks of keywords: each returns the value for llguidance.

    def _type(self, value: Any, where: str, *_: Any) -> Any:
        kinds = value if isinstance(value, list) else [value]
        if not kinds:
            raise Refused(f"the list of types at {where} must not be empty")
        for kind in kinds:
            if kind not in TYPES:
                raise Refused(f"the type at {where} must be one of {', '.join(TYPES)}, got {shown(kind)}")
        if isinstance(value, list):
            return list(dict.fromkeys(kinds))
        return value

    def _properties(self, value: Any, where: str, depth: int, is_alone: bool) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Refused(f"{where} must be an object, got {kind_of(value)}")
        if len(value) > MOST_PROPERTIES:
            raise Refused(f"{where} has more than {MOST_PROPERTIES} properties")
        return {name: self._subschema(each, step(where, name), depth, is_alone) for name, each in value.items()}

    def _pattern_properties(self, value: Any, where: str, depth: int, is_alone: bool) -> dict[str, Any]:
        prepared = self._properties(value, where, depth, is_alone)
        translated = {self._pattern(name, step(where, name), depth, is_alone): each for name, each in prepared.items()}
        if len(translated) < len(prepared):
            raise Refused(f"two patterns of {where} mean the same")
        return translated

    def _subschema(self, value: Any, where: str, depth: int, is_alone: bool) -> Any:
        """Prepare the schema of a part of an instance. If no value is valid for it, return False: the part may be
        missing."""
        try:
            return self._schema(value, where, depth + 1, is_alone)
        except Contradiction as contradiction:
            self._contradictions[where] = contradiction
            return False

    def _list(self, value: Any, where: str, depth: int, is_alone: bool) -> list[Any]:
        members = filled_list(value, where)
        return [self._subschema(each, step(where, i), depth, is_alone) for i, each in enumerate(members)]

    def _required(self, value: Any, where: str, *_: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise Refused(f"{where} must be a list of strings")
        return list(dict.fromkeys(value))

    def _enum(self, value: Any, where: str, depth: int, is_alone: bool) -> list[Any]:
        for index, each in enumerate(filled_list(value, where)):
            self._const(each, step(where, index), depth, is_alone)
        return list(value)

    def _const(self, value: Any, where: str, depth: int, is_alone: bool) -> Any:
        waiting = [(value, 0)]
        while waiting:
            each, level = waiting.pop()
            if level > MOST_DEPTH:
                raise Refused(f"the value at {where} has more than {MOST_DEPTH} values within each other")
            if isinstance(each, float) and abs(each) > LARGEST_NUMBER and not is_written_exactly(each):
                raise Refused(f"the value at {where} has the number {shown(each)}, which is no integer and is inexact")
            if isinstance(each, str) and not regexes.UNWRITABLE.isdisjoint(each):
                raise Refused(f"the value at {where} has a control character that strings of answers do not have")
            if isinstance(each, dict | list):
                waiting += [(inner, level + 1) for inner in (each.values() if isinstance(each, dict) else each)]
            self._has_large_numbers |= is_large(each)
        return value

    def _number(self, value: Any, where: str, *_: Any) -> Any:
        if not is_number(value):
            raise Refused(f"{where} must be a number, got {kind_of(value)}")
        return value

    def _multiple_of(self, value: Any, where: str, depth: int, is_alone: bool) -> Any:
        self._number(value, where)
        if value <= 0:
            raise Refused(f"{where} must be greater than 0, got {shown(value)}")
        decimal = Decimal(str(value)).normalize().as_tuple()
        if int(decimal.exponent) < -MOST_PLACES:
            raise Refused(f"{where} must have at most {MOST_PLACES} decimal places, got {shown(value)}")
        most = MOST_MULTIPLE if is_alone else 100
        if max(value, int("".join(map(str, decimal.digits)))) > most:
            raise Refused(
                f"{where} must be at most {most}, and so must its digits as a whole number"
                f"{'' if is_alone else ', together with other schemas'}; got {shown(value)}"
            )
        if value == int(value):
            return int(value)
        return value

    def _count(self, value: Any, where: str, *_: Any) -> int:
        if not is_number(value) or value != int(value) or not 0 <= value <= MOST_LENGTH:
            raise Refused(f"{where} must be an integer from 0 to {MOST_LENGTH}, got {shown(value)}")
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
        try:
            found = regexes.search(without_look_around(checked_string(value, where)))
        except Refused as refused:
            raise Refused(f"the pattern at {where} {refused.reason}") from None
        anchored = f"^{found.text}$"
        self._shortest[anchored] = found.least
        if not is_alone:
            self._joined_patterns.add(anchored)
        if len(self._joined_patterns) > MOST_JOINED_PATTERNS:
            raise Refused(
                f"the pattern at {where} is one of more than {MOST_JOINED_PATTERNS} that are joined with others"
            )
        return anchored

    # The targets of "$ref"

    def _reference(self, value: Any, where: str, depth: int, is_alone: bool, is_joined: bool) -> str:
        target, place = self._document.find(checked_string(value, where), where)
        if not isinstance(target, dict | bool):
            raise Refused(f"{where} refers to {shown(value)}, which is no schema but {kind_of(target)}")
        # All true schemas are the same object, and all false ones are, too.
        definition = self._definitions.get((id(target), is_alone))
        if definition is None:
            name = f"r{len(self._by_name)}"
            definition = Definition(name, target, place, is_alone)
            self._definitions[id(target), is_alone] = self._by_name[name] = definition
            self._waiting.append(definition)
        self._current.links.append((depth, definition.name))
        if is_joined:
            self._current.joined.append(definition.name)
        return f"#/$defs/{definition.name}"


# The supported keywords, except "$ref", "allOf", "anyOf" and "oneOf", which join schemas.
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
    "format": lambda _, value, where, *rest: checked_string(value, where),
}
