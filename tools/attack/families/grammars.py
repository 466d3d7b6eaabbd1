"""Constraints on answers that are broken, cannot be satisfied, or take too much: schemas, regexes and grammars.

A refused constraint must cost the other streams hardly more than other bytes that are refused. What is accepted is
computed like other work, and so the time of its steps is limited, as everywhere; its masks and its compiling are part
of that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

from tools.attack.attack import CHAT, FULL, HI, Family, Number, Sent, Strike, of_same_size, outcomes, post

TOKENS = 12  # tokens of an answer to a constraint that is accepted
FEW_AT_ONCE = 4
MANY_AT_ONCE = 16
Constraint = Mapping[str, Any]  # the fields of a body
numbers = count()
GRAMMARS = Family("grammars", "bombs in grammars and regexes")
NO = outcomes(400) | FULL
refused_or_done = partial(GRAMMARS.burst, outcomes=NO | outcomes(200), limit_seconds=120, is_work=True)


def record(properties: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **keywords}


def nested(num_levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(num_levels):
        value = record({"x": value})
    return value


def chain(length: int, **beside: Any) -> Any:
    definitions = {f"d{i}": record({"x": {"$ref": f"#/$defs/d{i + 1}", **beside}}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {}}}


PERSON = {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "mail": {"type": "string", "format": "email"},
    "born": {"type": "string", "format": "date"},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    "kind": {"enum": ["a", "b", "c"]},
}
SECTION = record({f"field_{i}": {"type": "string", "description": "x" * 80, "maxLength": 50 + i} for i in range(4)})
DOUBLING = {
    f"d{i}": record({name: {"$ref": f"#/$defs/d{i + 1}", "type": "object"} for name in "xy"}) for i in range(30)
} | {"d30": {"type": "object"}}


def schema(value: Any) -> Constraint:
    """Return the schema with a comment that no other one has, so that the server has not kept what became of it."""
    if isinstance(value, dict):
        value = {"$comment": f"{next(numbers)}", **value}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "attack", "schema": value}}}


def other(**kind: Any) -> Constraint:
    """Return one of vLLM's kinds: a regex, a grammar or choices."""
    return {"structured_outputs": kind}


def body(constraint: Constraint) -> bytes:
    return json.dumps({"messages": HI, "max_tokens": TOKENS, **constraint}).encode()


def asking(constraints: Iterable[Constraint]) -> list[Sent]:
    return [post(CHAT, body(each)) for each in constraints]


# -- what can only be refused -----------------------------------------------------------------------------------------

TWICE = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "integer"}}


@GRAMMARS.burst("schemas nested up to 500,000 deep", NO | outcomes(413), FEW_AT_ONCE, harmless=of_same_size)
def schemas_deep(number: Number) -> list[Sent]:
    """Most are too deep for this tool's own JSON."""
    forms = (('{"a": ', "}"), ('{"properties": {"a": ', "}}"), ('{"items": ', "}"), ('{"allOf": [', "]}"), ("[", "]"))
    deep = [
        body(schema("HERE")).replace(b'"HERE"', (begin * num_levels + "{}" + end * num_levels).encode())
        for begin, end in forms
        for num_levels in (1_000, 50_000, 500_000)
    ]
    less_deep = [{"messages": HI, **schema(nested(num_levels))} for num_levels in (51, 60, 100)]
    return [post(CHAT, each) for each in (*deep, *less_deep)]


# -- what may be done, if it takes no longer than other work ----------------------------------------------------------

EXPLODING = (
    {"$ref": "#/$defs/d0", "$defs": DOUBLING},
    {"$ref": "#/$defs/d0", "$defs": TWICE},
    chain(2_000),
    chain(400, type="object"),
    nested(49),
    {"allOf": [{"enum": list(range(70))}] * 2},
    {"allOf": [{"anyOf": [{"const": i} for i in range(40)]} for _ in range(4)]},
    {"allOf": [{"pattern": f"(.*{chr(97 + i)}.{{{i}}})*"} for i in range(12)]},
    record({f"p{i}": {"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(100, 700)}),
    {"type": "array", "maxItems": 10_000, "items": {"type": "array", "maxItems": 10_000}},
    {"type": "array", "minItems": 10_000, "maxItems": 10_000, "items": {"type": "string"}},
    {"type": "string", "minLength": 10**9, "maxLength": 10**9 + 1},
    {"type": "string", "minLength": 10_000, "maxLength": 2**31 - 1},
    {"const": "hello " * 2_600},
    {"const": "x" * 250_000},
    {"enum": [f"{i}" * 20 for i in range(5_000)]},
    {"type": "object", "properties": {f"p{i}": {} for i in range(1_000)}},
    {"type": "object", "patternProperties": {f"^a{i}": {} for i in range(500)}},
    {"anyOf": [record({f"a{i}": {"type": "string"}}) for i in range(2_000)]},
    {"oneOf": [record({"a": {"const": i}}) for i in range(1_000)]},
    {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
    record({"children": {"type": "array", "items": {"$ref": "#"}}}),
)


@refused_or_done("doubling definitions, long chains, joined unions and patterns, 10,000 items, ...",
                 at_once=FEW_AT_ONCE)  # fmt: skip
def schemas_exploding(number: Number) -> list[Sent]:
    return asking(map(schema, EXPLODING))


@refused_or_done("(a+)+b, .*a.{500}, (a?){1000}a{1000}, (a{1000}){100}, ...", at_once=FEW_AT_ONCE)
def regexes_exploding(number: Number) -> list[Sent]:
    regexes = (
        "(a+)+b", "(a*)*b", "(a|a)*b", "(a|aa)+$", "(.*)*", ".*a.{500}", ".*a.{20}b", "(a?){1000}a{1000}",
        "a{1,100000}", "(a{1000}){100}", "((a{10}){10}){10}", "(" * 49 + "a" + ")*" * 49, r"[\s\S]{0,16000}",
        "(x+x+)+y", "|".join(f"{i}x" for i in range(2_000)), "a?" * 4_000, "a" * 16_000,
    )  # fmt: skip
    kinds = (lambda regex: other(regex=regex), lambda regex: schema({"type": "string", "pattern": regex}))
    return asking(kind(regex) for kind in kinds for regex in regexes)


@refused_or_done("grammars that double, are ambiguous or endless, or reach for the library's own", at_once=FEW_AT_ONCE)
def grammars_hostile(number: Number) -> list[Sent]:
    doubling = "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(40))
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(200))
    grammars = (
        "start: " + '("a")? ' * 3_000, f'start: T40\n{doubling}\nT0: "a"', 'start: e\ne: e e | "a" | "aa" | ""',
        f'start: r0\n{rules}\nr200: "a"', "start: start", 'start: a\na: b "x"\nb: a "y"', "start: nothing", "start:",
        "", "\0", 'start: "a"{1,1000000}', "start: /(a+)+b/", "start: /(?=a)b/", "start: %json {}", "start: <|im_end|>",
        "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "start: <[7]>", "start: gen\ngen[max_tokens=5]: /.*/",
        "%import common.WORD\nstart: WORD", "root ::= root", "root ::= a\na ::= b", 'root ::= "a"{1,100000}',
        "root ::= " + "(" * 29 + '"a"' + "*)" * 29, "root ::= " + "(" * 5_000, "root ::= " + '"a" | ' * 9_000 + '"b"',
        f"root ::= [{'a-z' * 9_000}]", "x" * 65_537,
        *(unit * (65_000 // len(unit)) for unit in ('\\"', "\\/", "<", "a", "\n")),
    )  # fmt: skip
    return asking([*(other(grammar=grammar) for grammar in grammars), {"grammar": grammars[0]}])


@refused_or_done("10,000 choices, prefixes of each other, none", at_once=FEW_AT_ONCE)
def choices(number: Number) -> list[Sent]:
    lists = (
        [f"{i}" for i in range(number(10_000, 5_000))], ["a" * i for i in range(1, 361)], ["a" * 65_000, "a" * 65_001],
        [""], ["x"] * 10_000, [f"{i}" for i in range(10_001)], ["\0", "\u202e", "\U0010ffff"], [],
    )  # fmt: skip
    return asking(other(choice=each) for each in lists)


def large(number: int) -> Constraint:
    """Return a schema of 132 kB like no other."""
    return schema(record({f"section_{number}_{i}": SECTION for i in range(190)}))


@refused_or_done("40 different schemas of 132 kB, 4 at once", at_once=FEW_AT_ONCE, name="schemas-132kb")
def large_schemas(number: Number) -> list[Sent]:
    return asking(map(large, range(number(40, 8))))


@refused_or_done("1,000 different schemas, 16 at once", at_once=MANY_AT_ONCE, name="schemas-1000", limit_seconds=180)
def many_schemas(number: Number) -> list[Sent]:
    """A thousand different schemas, none of which is there already, many at once."""
    schemas = [record({**PERSON, f"own_{i}": {"type": "string"}}) for i in range(number(1_000, 100))]
    return asking(map(schema, schemas))


@GRAMMARS.attack("schemas of 132 kB, whose clients leave at once", outcomes("left", 200), is_work=True)
async def schemas_left(strike: Strike) -> None:
    """Clients that send a schema of 132 kB, and leave while it is compiled."""
    schemas = [post(CHAT, body(large(number))) for number in range(strike.number(40, 8))]
    await strike.leave_all(schemas, FEW_AT_ONCE, after_seconds=0.02)
    (asked,) = asking([schema(record(PERSON))])
    answer = await strike.ask(asked)
    strike.check(answer.status == 200, f"afterwards a schema got {answer.outcome}")
