"""Prepared schemas as grammars in Lark, for what llguidance's own JSON Schemas cannot do.

There, properties come in a fixed order, and numbers are floats. Here, properties may come in any order, each listed one
at most once: the rules of an object keep a bit for each property so far, so their size doesn't grow with the number of
orders. And large numbers in "enum" and "const" are written as text, as alternatives to the rest of their schema. Parts
that need neither stay JSON Schemas, which the grammar calls by name.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from oaiserve.engine.grammars.json_schema.prepare import PreparedSchema
from oaiserve.engine.grammars.json_schema.terms import (
    TYPES,
    has_large,
    holds_for_number,
    is_large,
    is_number,
    is_of,
    kinds_of,
    stated_values,
    values_of,
)
from oaiserve.engine.grammars.refusal import Refused

MOST_NAMES = 60  # properties of an object: a rule has 64 bits
MOST_RULES = 600  # rules for objects, and JSON Schemas: the lexemes of all of them share one lexer
MOST_CHARACTERS = 2**20  # maximum characters of all JSON Schemas; each counts as often as it is referenced
MOST_LOOKS = 50_000  # visits of schemas in the search for large numbers
MOST_PATTERNS = 8  # maximum patterns of an object, each of which excludes the others
_JOINING = {"$ref", "anyOf", "allOf", "enum", "const"}
_OF_CONTAINERS = {
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties"),
    *("items", "prefixItems", "minItems", "maxItems"),
}
_REFERENCE = "#/$defs/"
_SEPARATORS = {"COMMA": "item_separator", "COLON": "key_separator"}
_NAMES = (
    r'NAME: /"(?:[^"\\\x00-\x1F\x7F]|\\[nrbtf\\"])*"/',
    r'PLAIN_NAME: /"[^"\\\x00-\x1F\x7F]*"/',
)


class _NotPossible(Exception):
    """The schema is too large for a grammar of rules, or no value is valid under some part of it."""


def as_rules(
    schema: PreparedSchema, options: Mapping[str, Any], name: str = "part", *, in_order: bool
) -> list[dict[str, Any]]:
    """Return the grammars of a prepared schema, the main one first; none if it needs no rules, or rules aren't
    possible. Raises Refused if a number would have to change without them.

    llguidance's `options` for JSON Schemas apply to all of them. The names of all but the main one begin with `name`.
    """
    try:
        return _Rules(schema, name, in_order=in_order).grammars(options)
    except _NotPossible:
        if not schema.has_large_numbers:
            return []
        raise Refused(
            "numbers beyond 2^53 - 1 in 'enum' or 'const' are not supported within objects that are joined with others "
            "or have 'maxProperties', or in a schema of that size"
        ) from None


class _Rules:
    def __init__(self, schema: PreparedSchema, name: str, *, in_order: bool) -> None:
        self._name = name
        self._in_order = in_order
        self._has_large_numbers = schema.has_large_numbers
        self._definitions: Mapping[str, Any] = schema.document.get("$defs", {})
        self._root = {keyword: value for keyword, value in schema.document.items() if keyword != "$defs"}
        self._lines: list[str] = []
        self._num_rules = self._num_characters = self._num_looks = 0
        self._known: dict[int, bool] = {}  # results of `_needs_rules`, keyed by the ids of the document's schemas
        self._values: dict[int, tuple[Any, set[str] | None]] = {}  # schemas, which keep their ids, and `values_of` them
        self._schemas: dict[str, str] = {}  # names of JSON Schemas by their texts
        self._of_definitions: dict[str, str] = {}  # names of the rules of definitions
        self._waiting: deque[str] = deque()

    def grammars(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not self._needs_rules(self._root):
            if self._has_large_numbers:
                self._json_schema(self._root)  # raises Refused if a large number is left
            return []
        self._lines.append(f"start: {self._value(self._root)}")
        while self._waiting:
            name = self._waiting.popleft()
            self._lines.append(f"{self._of_definitions[name]}: {self._value(self._definitions[name])}")
        # The lexer takes the longest lexeme, so JSON must be split in the same way as in the JSON Schemas.
        self._lines += [f"{name}: /{options[option]}/" for name, option in _SEPARATORS.items()]
        if "whitespace_pattern" in options:
            self._lines.append(f"%ignore /{options['whitespace_pattern']}/")
        lark = "\n".join(['%llguidance {"ignore_once": true}', *self._lines, *_NAMES])
        schemas = (
            {"name": name, "json_schema": {**json.loads(text), "x-guidance": options}}
            for text, name in self._schemas.items()
        )
        return [{"lark_grammar": lark}, *schemas]

    def _needs_rules(self, schema: Any) -> bool:
        """Return whether a part of an instance has an open order or a large number, which rules can express."""
        if not isinstance(schema, dict):
            return False
        if id(schema) not in self._known:
            self._known[id(schema)] = self._finds_use(schema)
        return self._known[id(schema)]

    def _finds_use(self, schema: dict[str, Any]) -> bool:
        if schema.keys() & _JOINING:
            if self._has_large_numbers and any(self._large_values(schema)):
                return True
            members = schema.get("anyOf", ())
            return len(schema) == 1 and ("$ref" in schema or any(map(self._needs_rules, members)))
        names = {*schema.get("properties", ()), *schema.get("required", ())}
        patterns = schema.get("patternProperties", {})
        first = schema.get("prefixItems", [])
        if "maxProperties" in schema or max(len(names), len(first)) > MOST_NAMES or len(patterns) > MOST_PATTERNS:
            return False
        has_others = bool(patterns) or schema.get("additionalProperties", True) is not False
        if not self._in_order and "object" in kinds_of(schema) and names and len(names) + has_others > 1:
            return True
        inner = [*schema.get("properties", {}).values(), *patterns.values(), *first]
        return any(map(self._needs_rules, [*inner, schema.get("additionalProperties"), schema.get("items")]))

    def _new_rule(self) -> str:
        self._num_rules += 1
        if self._num_rules > MOST_RULES:
            raise _NotPossible
        return f"rule_{self._num_rules}"

    def _value(self, schema: Any) -> str:
        """Return the expression of a value."""
        if not self._needs_rules(schema):
            return self._json_schema(schema)
        if len(schema) == 1 and "$ref" in schema:
            return self._definition(schema["$ref"].removeprefix(_REFERENCE))
        if len(schema) == 1 and "anyOf" in schema:
            return _either(self._value(each) for each in schema["anyOf"] if each is not False)
        if schema.keys() & _JOINING:
            return self._with_large(schema)
        kinds = kinds_of(schema)
        values = []
        if "object" in kinds:
            values.append(self._object(schema))
        if "array" in kinds:
            values.append(self._array(schema))
        if others := [kind for kind in TYPES if kind in kinds and kind not in ("object", "array")]:
            scalar = {keyword: value for keyword, value in schema.items() if keyword not in _OF_CONTAINERS}
            values.append(self._json_schema({**scalar, "type": others}))
        return _either(values)

    def _with_large(self, schema: dict[str, Any]) -> str:
        """Return the expression of a schema with large numbers, or with values that contain them."""
        values = [self._constant(value) for value in self._large_values(schema) if self._holds(schema, value)]

        def remains(value: Any) -> bool:
            return not has_large(value) and (not is_number(value) or self._holds(schema, value))

        rest = self._without_large(schema, remains)
        if rest is False and not values:
            raise _NotPossible
        return _either(values if rest is False else [*values, self._json_schema(rest)])

    def _constant(self, value: Any) -> str:
        if not has_large(value):
            return self._json_schema({"const": value})
        if isinstance(value, dict):
            members = " COMMA ".join(f"{_literal(name)} COLON {self._constant(each)}" for name, each in value.items())
            return f'("{{" {members} "}}")'
        if isinstance(value, list):
            return f'("[" {" COMMA ".join(map(self._constant, value))} "]")'
        return f'"{int(value)}"'

    def _large_values(self, schema: Any) -> Iterator[Any]:
        """Yield the values with large numbers that a schema, or one joined with it, states for an instance."""
        waiting = [schema]
        entered = set()
        while waiting:
            self._look()
            each = waiting.pop()
            if isinstance(each, dict):
                yield from filter(has_large, stated_values(each))
                waiting += [*each.get("allOf", ()), *each.get("anyOf", ())]
                if "$ref" in each and each["$ref"] not in entered:
                    entered.add(each["$ref"])
                    waiting.append(self._target(each))

    def _holds(self, schema: Any, value: Any) -> bool:
        """Return whether a value is valid under a schema."""
        self._look()
        if not isinstance(schema, dict):
            return bool(schema)
        if "$ref" in schema and not self._holds(self._target(schema), value):
            return False
        if not all(self._holds(each, value) for each in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(self._holds(each, value) for each in schema["anyOf"]):
            return False
        if (texts := self._values_of(schema)) is not None and not texts & (values_of({"const": value}) or set()):
            return False
        if "type" in schema and not is_of(value, kinds_of({"type": schema["type"]})):
            return False
        if is_number(value):
            return holds_for_number(schema, value)
        if schema.keys() & _OF_CONTAINERS:
            raise _NotPossible
        return True

    def _values_of(self, schema: dict[str, Any]) -> set[str] | None:
        """Return `values_of` a schema, cached because each of its values is compared with all of them."""
        if id(schema) not in self._values:
            self._values[id(schema)] = (schema, values_of(schema))
        return self._values[id(schema)][1]

    def _without_large(self, schema: Any, remains: Callable[[Any], bool]) -> Any:
        """Return a schema reduced to the values that `remains` accepts, or False if nothing is left."""
        self._look()
        if not isinstance(schema, dict) or not any(self._large_values(schema)):
            return schema
        changed = {keyword: value for keyword, value in schema.items() if keyword not in ("$ref", "allOf", "const")}
        if values := stated_values(schema):
            changed["enum"] = [value for value in values if remains(value)]
        joined = [*schema.get("allOf", ()), *([self._target(schema)] if "$ref" in schema else [])]
        if joined:
            changed["allOf"] = [self._without_large(each, remains) for each in joined]
        if "anyOf" in schema:
            alternatives = [self._without_large(each, remains) for each in schema["anyOf"]]
            changed["anyOf"] = [each for each in alternatives if each is not False]
        is_empty = [] in (changed.get("enum"), changed.get("anyOf")) or False in changed.get("allOf", ())
        return False if is_empty else changed

    def _look(self) -> None:
        self._num_looks += 1
        if self._num_looks > MOST_LOOKS:
            raise _NotPossible

    def _target(self, schema: dict[str, Any]) -> Any:
        return self._definitions[schema["$ref"].removeprefix(_REFERENCE)]

    def _definition(self, name: str) -> str:
        if name not in self._of_definitions:
            self._of_definitions[name] = self._new_rule()
            self._waiting.append(name)
        return self._of_definitions[name]

    def _json_schema(self, schema: Any) -> str:
        """Return the call of a JSON Schema, with the definitions that it refers to."""
        if schema is False:
            raise _NotPossible
        if schema is True:
            schema = {}
        definitions: dict[str, Any] = {}
        waiting = [schema]
        while waiting:
            each = waiting.pop()
            if isinstance(each, dict):
                name = str(each.get("$ref", "")).removeprefix(_REFERENCE)
                if name in self._definitions and name not in definitions:
                    definitions[name] = self._definitions[name]
                    waiting.append(definitions[name])
                waiting += each.values()
            elif isinstance(each, list):
                waiting += each
            elif is_large(each):
                raise _NotPossible
        text = json.dumps({**schema, "$defs": definitions} if definitions else schema)
        self._num_characters += len(text)
        if self._num_characters > MOST_CHARACTERS:
            raise _NotPossible
        if text not in self._schemas:
            self._new_rule()
            self._schemas[text] = f"{self._name}_{len(self._schemas)}"
        return f"@{self._schemas[text]}"

    def _array(self, schema: dict[str, Any]) -> str:
        least = schema.get("minItems", 0)
        items = schema.get("items", True)
        first = schema.get("prefixItems", [])
        ends = [schema.get("maxItems"), *(number for number, each in enumerate([*first, items]) if each is False)]
        most = min((end for end in ends if end is not None), default=None)
        if most is not None and least > most:
            raise _NotPossible
        elements = first[:most] if first or most == 0 else [items]
        text = ""
        if most is None or most > len(elements):
            more = "" if most is None else most - len(elements)
            text = f"(COMMA {self._value(items)}){{{max(0, least - len(elements))},{more}}}"
        for number, each in reversed([*enumerate(elements)]):
            text = f"{'COMMA ' if number else ''}{self._value(each)} {text}"
            text = text if number < least else f"({text})?"
        return f'("[" {text} "]")'

    def _object(self, schema: dict[str, Any]) -> str:
        listed = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        rule = self._new_rule()
        possible = [name for name, each in listed.items() if each is not False or name in required]
        names = list(dict.fromkeys([*possible, *required] if self._in_order else [*required, *possible]))
        bits = [bit for bit, name in enumerate(names) if name in required]
        members = [
            f"{_literal(name)} COLON {self._value(listed.get(name, others))} {rule}_more::set_bit({bit})"
            f" %if {self._may_follow(bit, len(names), bits)}"
            for bit, name in enumerate(names)
        ]
        num = len(names)  # This is also the bit for unlisted properties, which may repeat.
        unlisted = [
            f"{key} COLON {self._value(each)} {rule}_more::set_bit({num}) %if {self._may_follow(num, num, bits)}"
            for key, each in self._unlisted(rule, schema)
        ]
        conditions = [self._has(bits)] if bits else []
        if (least := schema.get("minProperties", 0)) > len(required):
            conditions.append(f"bit_count_ge([0:{num + 1}], {least})")
        end = '"}"' + (f" %if {_both(conditions)}" if conditions else "")
        goes_on = ""
        if not unlisted:
            goes_on = f" %if {f'bit_clear({num - 1})' if self._in_order else f'not(is_ones([0:{num}]))'}"
        empty = "" if conditions else ' | "{" "}"'
        self._lines += [
            f'{rule}: "{{" {rule}_next::0x0{empty}',
            f"{rule}_next::_: {' | '.join([*members, *unlisted])}",
            f"{rule}_more::_: {end} | COMMA {rule}_next::_{goes_on}",
        ]
        return rule

    def _has(self, required: Sequence[int]) -> str:
        """Return the condition that all required properties, given as bits, are present."""
        return f"bit_set({required[-1]})" if self._in_order else f"is_ones([0:{len(required)}])"

    def _may_follow(self, bit: int, num_names: int, required: Sequence[int]) -> str:
        """Return the condition for a property. Unlisted ones come after the required ones: otherwise a model that keeps
        inventing properties would never reach these."""
        if bit == num_names:
            return self._has(required) if required else "true"
        if not self._in_order:
            return f"bit_clear({bit})"
        none_later = f"is_zeros([{bit}:{num_names + 1}])"
        earlier = [each for each in required if each < bit]
        return _both([none_later, self._has(earlier)]) if earlier else none_later

    def _unlisted(self, rule: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield terminals for the names of unlisted properties, with their schemas."""
        patterns = schema.get("patternProperties", {})
        terminals = [f"{rule.upper()}_MATCH_{number}" for number in range(len(patterns))]
        for terminal, pattern in zip(terminals, patterns, strict=True):
            # The pattern describes the unescaped name, so these names contain nothing that needs an escape.
            self._lines.append(f'{terminal}: /"(?:{pattern[1:-1]})"/ & PLAIN_NAME')
        schemas = dict(zip(terminals, patterns.values(), strict=True))
        schemas["PLAIN_NAME" if patterns else "NAME"] = schema.get("additionalProperties", True)
        taken = [_literal(name) for name in dict.fromkeys([*schema.get("properties", ()), *schema.get("required", ())])]
        for number, (terminal, each) in enumerate(schemas.items()):
            if each is False:
                continue
            key = f"{rule.upper()}_KEY_{number}"
            excluded = [*taken, *(other for other in terminals if other != terminal)]
            self._lines.append(f"{key}: {terminal}" + (f" & ~({' | '.join(excluded)})" if excluded else ""))
            yield key, each


def _either(values: Iterable[str]) -> str:
    alternatives = list(dict.fromkeys(values))
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _both(conditions: Sequence[str]) -> str:
    return conditions[0] if len(conditions) == 1 else f"and({', '.join(conditions)})"


def _literal(name: str) -> str:
    """Return the expression of a property's name. Lark quotes strings as JSON does."""
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
