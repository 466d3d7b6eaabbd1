"""Refuses schemas too long, too deep or too large for llguidance, because compiling cannot be interrupted.

A document is refused because of its definitions if they refer to themselves without end, nest too deeply, are copied
too often, or require too long a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from oaiserve.engine.grammars.json_schema.terms import TYPES, kinds_of
from oaiserve.engine.grammars.refusal import Refused

MOST_LINKED_DEPTH = 500  # schemas nested through references, each of which llguidance enters once, on the stack
MOST_COMBINED = 5_000  # schemas that "allOf" or "$ref" joins with others, so that they are copied
MOST_OPTIONS = 2_000  # combinations of alternatives when unions are joined; each takes a fifth of a millisecond
MOST_LOOKS = 300_000  # visits of schemas in the search for recursion; chains of references visit a schema repeatedly
MOST_FORCED = 2**14  # characters that an answer must contain in a row: they are computed in one go


@dataclass(slots=True)
class Definition:
    """A definition of the document, prepared once for all references to it."""

    name: str
    schema: Any
    place: str
    is_alone: bool
    prepared: dict[str, Any] | bool = True
    num_schemas: int = 0
    # (depth of a reference, name of its target) pairs, in order.
    links: list[tuple[int, str]] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)  # targets that are copied into the schemas next to them


class SchemaLimits:
    def __init__(
        self,
        root: Definition,
        by_name: dict[str, Definition],
        places: list[tuple[dict[str, Any], str]],
        shortest: dict[str, int],
    ) -> None:
        """`places` has each schema with its place, and `shortest` the length of the shortest match of each pattern."""
        self._root = root
        self._by_name = by_name
        self._places = places
        self._shortest = shortest
        self._types: dict[str, frozenset[str]] = {}  # a superset of the types of an instance of each definition
        self._num_looks = 0

    def check(self) -> None:
        """Raise Refused if a limit is exceeded."""
        self._check_loops()
        self._check_links()
        self._check_joined()

    def _check_loops(self) -> None:
        """Refuse a schema that refers to itself endlessly, for the same instance or for one within it."""

        def has_types(each: Definition, done: set[str]) -> bool:
            if any(name not in done for name in _same_instance(each.prepared)):
                return False
            self._types[each.name] = self._possible(each.prepared)
            return True

        for each in self._never(has_types):
            raise Refused(f"the schema at {each.place} refers to itself for the same value")
        least: dict[str, float] = {}  # length of the shortest instance of each definition

        def can_end(each: Definition, done: set[str]) -> bool:
            least[each.name] = self._least(each.prepared, least)
            return least[each.name] < inf

        for each in self._never(can_end):
            raise Refused(f"the schema at {each.place} refers to itself without an end")
        for part, place in self._places:
            if self._least(part, least) > MOST_FORCED:
                raise Refused(f"a value that is valid at {place} must have more than {MOST_FORCED} characters")

    def _least(
        self,
        prepared: Any,
        least: dict[str, float],
        kinds: frozenset[str] = frozenset(TYPES),
        required: frozenset[str] = frozenset(),
    ) -> float:
        """Return the length of the shortest instance with these types and properties: inf if it never ends."""
        if not isinstance(prepared, dict):
            return 1
        kinds &= self._possible(prepared)
        required |= frozenset(prepared.get("required", ()))
        bounds: list[float] = [1]
        if "$ref" in prepared:
            bounds.append(least.get(prepared["$ref"].removeprefix("#/$defs/"), inf))
        bounds += [self._least(each, least, kinds, required) for each in prepared.get("allOf", ())]
        if "anyOf" in prepared:
            bounds.append(min(self._least(each, least, kinds, required) for each in prepared["anyOf"]))
        if "const" in prepared or "enum" in prepared:
            if "enum" in prepared:
                values = prepared["enum"]
            else:
                values = [prepared["const"]]
            bounds.append(min(len(json.dumps(value, ensure_ascii=False)) for value in values))
        match sorted(kinds):
            case ["object"]:
                listed = prepared.get("properties", {})
                if "patternProperties" in prepared:
                    others = None
                else:
                    others = prepared.get("additionalProperties")
                bounds.append(sum(len(name) + self._least(listed.get(name, others), least) for name in required))
            case ["array"]:
                first = prepared.get("prefixItems", [])
                num = prepared.get("minItems", 0)
                more = num - len(first)
                bounds.append(sum(self._least(each, least) for each in first[:num]))
                if more > 0:
                    bounds[-1] += more * self._least(prepared.get("items"), least)
            case ["string"]:
                bounds.append(max(prepared.get("minLength", 0), self._shortest.get(prepared.get("pattern", ""), 0)))
        return max(bounds)

    def _possible(self, prepared: Any) -> frozenset[str]:
        """Return a superset of the types of an instance, if the types of the definitions in it are known."""
        if not isinstance(prepared, dict):
            return frozenset(TYPES)
        possible = frozenset(kinds_of(prepared))
        for each in prepared.get("allOf", ()):
            possible &= self._possible(each)
        if "$ref" in prepared:
            possible &= self._types[prepared["$ref"].removeprefix("#/$defs/")]
        if "anyOf" in prepared:
            possible &= frozenset[str]().union(*map(self._possible, prepared["anyOf"]))
        return possible

    def _check_links(self) -> None:
        """Refuse references that nest too deeply for llguidance, which follows each reference where it first meets
        it."""
        depths: dict[str, int] = {}  # the longest chain of references below each definition

        def is_known(each: Definition, done: set[str]) -> bool:
            if any(name not in done for _, name in each.links):
                return False
            depths[each.name] = max((inner + depths[name] for inner, name in each.links), default=0)
            return True

        # Definitions that lead back to each other. Each of them is entered once.
        loops = sum(max(inner for inner, _ in each.links) for each in self._never(is_known))
        if loops + max(depths.values(), default=0) > MOST_LINKED_DEPTH:
            raise Refused(f"the schema has more than {MOST_LINKED_DEPTH} schemas within each other, through '$ref'")

    def _never(self, is_done: Callable[[Definition, set[str]], bool]) -> list[Definition]:
        """Return the definitions that are never done. `is_done` decides about a definition, given the names of those
        that are."""
        done: set[str] = set()
        left = [self._root, *self._by_name.values()]
        while True:
            # Alternate the direction, so that a chain takes few rounds.
            waiting = left[::-1]
            left = []
            for each in waiting:
                self._num_looks += 1 + each.num_schemas
                if self._num_looks > MOST_LOOKS:
                    raise Refused("the schema has too many definitions that refer to each other")
                if is_done(each, done):
                    done.add(each.name)
                else:
                    left.append(each)
            if len(left) == len(waiting):
                return left

    def _check_joined(self) -> None:
        """Refuse schemas that become too large when references that are joined with other schemas are replaced by their
        targets."""
        sizes: dict[str, int] = {}
        total = 0
        for definition in [self._root, *self._by_name.values()]:
            if definition.joined:
                total += self._joined_size(definition, sizes, ())
            if total > MOST_COMBINED:
                raise Refused(
                    f"the schema joins more than {MOST_COMBINED} schemas with others, by 'allOf' or next to '$ref', "
                    f"at {definition.place}"
                )

        for part, place in self._places:
            is_joined = "allOf" in part or (len(part) > 1 and ("anyOf" in part or "$ref" in part))
            if is_joined and self._num_options(part) > MOST_OPTIONS:
                raise Refused(f"the schema at {place} joins unions that come to more than {MOST_OPTIONS} combinations")

    def _num_options(self, prepared: Any) -> int:
        """Return the number of alternatives of a schema. When unions are joined, their numbers multiply."""
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

    def _joined_size(self, definition: Definition, sizes: dict[str, int], around: tuple[str, ...]) -> int:
        if definition.name in around or len(around) > MOST_LINKED_DEPTH:
            raise Refused(f"a '$ref' at {definition.place} leads back to itself, by 'allOf' or next to other keywords")
        if definition.name not in sizes:
            size = definition.num_schemas
            for name in definition.joined:
                size += self._joined_size(self._by_name[name], sizes, (*around, definition.name))
            sizes[definition.name] = min(size, MOST_COMBINED + 1)
        return sizes[definition.name]


def _same_instance(prepared: Any) -> Iterator[str]:
    """Yield the names of the definitions that apply to the same instance as the schema."""
    if isinstance(prepared, dict):
        if "$ref" in prepared:
            yield prepared["$ref"].removeprefix("#/$defs/")
        for each in (*prepared.get("allOf", ()), *prepared.get("anyOf", ())):
            yield from _same_instance(each)
