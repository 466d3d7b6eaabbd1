"""Constraints on answers that are broken, cannot be satisfied, or take too much: schemas, regexes and grammars.

A refused constraint must cost the other streams hardly more than other bytes that are refused. What is accepted is
computed like other work, and so the time of its steps is limited, as everywhere; its masks and its compiling are part
of that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

from tools.attack.attack import CHAT, FULL, HI, Family, Number, Sent, Strike, of_same_size, outcomes, post
from tools.attack.wire import Answer, few_at_once

TOKENS = 12  # tokens of an answer to a constraint that is accepted
FEW_AT_ONCE = 4
MANY_AT_ONCE = 16
Constraint = Mapping[str, Any]  # the fields of a body
numbers = count()
GRAMMARS = Family("grammars", "bombs in grammars and regexes")
NO = outcomes(400) | FULL
NO_OR_DONE = NO | outcomes(200)
refused = partial(GRAMMARS.attack, outcomes=NO, harmless=of_same_size)
refused_or_done = partial(GRAMMARS.attack, outcomes=NO_OR_DONE, limit_seconds=120, is_work=True)


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


async def ask(strike: Strike, constraint: Constraint, *, may_pass: bool) -> Answer:
    """Send a constraint. Where it is refused, the error must name its field."""
    answer = await strike.ask(post(CHAT, body(constraint)))
    (field,) = constraint
    if answer.status == 400 and answer.error is not None:
        strike.check(answer.error.get("param") == field, f"an error about {field} names {answer.error.get('param')!r}")
    strike.check(may_pass or answer.status != 200, f"accepted: {json.dumps(constraint)[:200]}")
    return answer


async def ask_all(
    strike: Strike, constraints: Iterable[Constraint], *, may_pass: bool = True, at_once: int = FEW_AT_ONCE
) -> None:
    await few_at_once([partial(ask, strike, each, may_pass=may_pass) for each in constraints], at_once)


def as_regex_and_pattern(regexes: Iterable[str]) -> list[Constraint]:
    kinds = (lambda regex: other(regex=regex), lambda regex: schema({"type": "string", "pattern": regex}))
    return [kind(regex) for kind in kinds for regex in regexes]


# -- what can only be refused -----------------------------------------------------------------------------------------

TWICE = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "integer"}}


@refused("schemas of other documents and hosts")
async def schemas_remote(strike: Strike) -> None:
    """References to other documents, one of them on a port where somebody counts who comes."""
    num_fetched = 0

    def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_fetched
        num_fetched += 1
        writer.close()

    async with await asyncio.start_server(come, "127.0.0.1", 0) as server:
        here = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        places = (
            f"http://{here}/a.json", f"https://{here}/a.json", f"//{here}/a.json", "file:///etc/passwd",
            "http://169.254.169.254/latest/meta-data", "other.json#/a", "urn:a:b", "data:application/json,{}",
        )  # fmt: skip
        values = [{"$ref": place} for place in places]
        values += [{"$id": f"http://{here}/", "$ref": "a.json"}, record({"a": {"anyOf": [{"$ref": places[0]}, {}]}})]
        await ask_all(strike, map(schema, values), may_pass=False)
    strike.check(not num_fetched, f"the server fetched a schema {num_fetched} times")


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


@refused_or_done("doubling definitions, long chains, joined unions and patterns, 10,000 items, ...")
async def schemas_exploding(strike: Strike) -> None:
    await ask_all(strike, map(schema, EXPLODING))


@refused_or_done("(a+)+b, .*a.{500}, (a?){1000}a{1000}, (a{1000}){100}, ...")
async def regexes_exploding(strike: Strike) -> None:
    regexes = (
        "(a+)+b", "(a*)*b", "(a|a)*b", "(a|aa)+$", "(.*)*", ".*a.{500}", ".*a.{20}b", "(a?){1000}a{1000}",
        "a{1,100000}", "(a{1000}){100}", "((a{10}){10}){10}", "(" * 49 + "a" + ")*" * 49, r"[\s\S]{0,16000}",
        "(x+x+)+y", "|".join(f"{i}x" for i in range(2_000)), "a?" * 4_000, "a" * 16_000,
    )  # fmt: skip
    await ask_all(strike, as_regex_and_pattern(regexes))


@refused_or_done("grammars that double, are ambiguous or endless, or reach for the library's own")
async def grammars_hostile(strike: Strike) -> None:
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
    await ask_all(strike, [*(other(grammar=grammar) for grammar in grammars), {"grammar": grammars[0]}])


@refused_or_done("10,000 choices, prefixes of each other, none")
async def choices(strike: Strike) -> None:
    number = strike.number(10_000, 5_000)
    lists = (
        [f"{i}" for i in range(number)], ["a" * i for i in range(1, 361)], ["a" * 65_000, "a" * 65_001], [""],
        ["x"] * 10_000, [f"{i}" for i in range(10_001)], ["\0", "\u202e", "\U0010ffff"], [],
    )  # fmt: skip
    await ask_all(strike, [other(choice=each) for each in lists])


def large(number: int) -> Constraint:
    """Return a schema of 132 kB like no other."""
    return schema(record({f"section_{number}_{i}": SECTION for i in range(190)}))


@refused_or_done("40 different schemas of 132 kB, 4 at once", name="schemas-132kb")
async def large_schemas(strike: Strike) -> None:
    await ask_all(strike, map(large, range(strike.number(40, 8))))


@refused_or_done("1,000 different schemas, 16 at once", name="schemas-1000", limit_seconds=180)
async def many_schemas(strike: Strike) -> None:
    """A thousand different schemas, none of which is there already, many at once."""
    schemas = [record({**PERSON, f"own_{i}": {"type": "string"}}) for i in range(strike.number(1_000, 100))]
    await ask_all(strike, map(schema, schemas), at_once=MANY_AT_ONCE)


@GRAMMARS.attack("schemas of 132 kB, whose clients leave at once", outcomes("left", 200), is_work=True)
async def schemas_left(strike: Strike) -> None:
    """Clients that send a schema of 132 kB, and leave while it is compiled."""
    schemas = [post(CHAT, body(large(number))) for number in range(strike.number(40, 8))]
    await strike.leave_all(schemas, FEW_AT_ONCE, after_seconds=0.02)
    answer = await ask(strike, schema(record(PERSON)), may_pass=True)
    strike.check(answer.status == 200, f"afterwards a schema got {answer.outcome}")
