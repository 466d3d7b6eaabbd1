"""Measures how long grammars take to compile and their masks to make, attacks included: python -m tools.grammar_times

Each row is compiled by a cache of its own. Then several answers are drawn at random among the tokens that are allowed,
each with a matcher of its own, as in a server. Times are in milliseconds, with the demo model's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from oaiserve.engine.grammars.grammar import GrammarGivenUp, Grammars
from oaiserve.engine.request import Grammar, GrammarKind
from oaiserve.errors import InvalidRequest
from oaiserve.files import demo
from tools.markdown import as_markdown, number

NUM_ANSWERS = 5
MOST_TOKENS = 300
NUM_KEPT = 1_000  # different schemas, for the memory of the cache


@dataclass(frozen=True)
class Case:
    name: str
    kind: GrammarKind
    text: str


def schema(name: str, value: Any) -> Case:
    return Case(name, "json_schema", json.dumps(value))


def record(properties: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **keywords}


def nested(num_levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(num_levels):
        value = record({"x": value})
    return value


def chain(length: int, **beside: Any) -> Any:
    each = [{f"d{i}": record({"x": {"$ref": f"#/$defs/d{i + 1}", **beside}})} for i in range(length)]
    return {
        "$ref": "#/$defs/d0",
        "$defs": {name: value for pair in each for name, value in pair.items()} | {f"d{length}": {}},
    }


PERSON = record(
    {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "kind": {"enum": ["a", "b", "c"]},
    }
)
TREE = record({"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}})
SECTION = record({f"field_{i}": {"type": "string", "description": "x" * 80, "maxLength": 50 + i} for i in range(4)})
DOUBLING = {
    f"d{i}": record({name: {"$ref": f"#/$defs/d{i + 1}", "type": "object"} for name in "xy"}) for i in range(30)
} | {"d30": {"type": "object"}}
SET = {"type": "array", "items": {"enum": [f"value {i}" for i in range(6)]}, "uniqueItems": True}
CASES = [
    schema("one enum", record({"color": {"enum": ["red", "blue"]}})),
    schema("six fields", PERSON),
    schema(
        "nested, with references and lengths",
        record({f"p{i}": {"$ref": "#/$defs/p"} for i in range(9)}, **{"$defs": {"p": PERSON}}),
    ),
    schema("recursive", TREE),
    Case("any object", "json_object", ""),
    schema("200 sections", record({f"section_{i}": SECTION for i in range(200)})),
    schema("600 enums of 10", record({f"p{i}": {"enum": [f"value {j}" for j in range(10)]} for i in range(600)})),
    schema("1,000 optional properties", {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}),
    schema("string of 900 to 3,000", {"type": "string", "minLength": 900, "maxLength": 3000}),
    schema("49 levels", nested(49)),
    Case("regex", "regex", r"[A-Z]{2}-\d{4}(-[a-z]+)?"),
    Case("1,000 choices", "choice", json.dumps([f"choice number {i}" for i in range(1000)])),
    Case("GBNF", "gbnf", 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"'),
    schema("attack: 400 levels", nested(400)),
    schema("attack: definitions that double 30 times", {"$ref": "#/$defs/d0", "$defs": DOUBLING}),
    schema("attack: 2,000 definitions in a chain", chain(2000)),
    schema("attack: joined unions", {"allOf": [{"enum": list(range(44))}] * 2}),
    schema("attack: 2 sets of 6 values", record(dict.fromkeys("ab", SET))),
    schema("attack: 12 joined patterns", {"allOf": [{"pattern": f"(.*{chr(97 + i)}.{{{i}}})*"} for i in range(12)]}),
    schema(
        "attack: 600 patterns",
        record({f"p{i}": {"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(100, 700)}),
    ),
    schema(
        "attack: nested lists of 10,000",
        {"type": "array", "maxItems": 10_000, "items": {"type": "array", "maxItems": 10_000}},
    ),
    schema("attack: a constant of 16,000 characters", {"const": "hello " * 2_600}),
    schema("attack: a constant of 250,000 characters", {"const": "x" * 250_000}),
    Case("attack: a{1,100000}", "regex", "a{1,100000}"),
    Case("attack: (a{1000}){100}", "regex", "(a{1000}){100}"),
    Case("attack: (a+)+b", "regex", "(a+)+b"),
    Case("attack: .*a.{500}", "regex", ".*a.{500}"),
    Case("attack: (a?){1000}a{1000}", "regex", "(a?){1000}a{1000}"),
    Case("attack: a rule of 3,000 optional parts", "lark", "start: " + '("a")? ' * 3000),
    Case(
        "attack: terminals that double 40 times",
        "lark",
        "start: T40\n" + "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(40)) + '\nT0: "a"',
    ),
    Case("attack: an ambiguous rule", "lark", 'start: e\ne: e e | "a" | "aa" | ""'),
]


class Demo:
    def __init__(self) -> None:
        self.backend = tokenizers.Tokenizer.from_file(str(demo.resolve() / "tokenizer.json"))
        self.vocab_size = self.backend.get_vocab_size()
        self.eos = np.array([self.backend.token_to_id("<|im_end|>"), self.backend.token_to_id("<|endoftext|>")])

    def grammars(self) -> Grammars:
        return Grammars(self.backend, vocab_size=self.vocab_size, eos_token_ids=frozenset(self.eos.tolist()))


def row(model: Demo, case: Case) -> tuple[str, ...]:
    grammars = model.grammars()
    begin = time.perf_counter()
    try:
        compiled = grammars.compile(Grammar(case.kind, case.text))
    except InvalidRequest as error:
        refused = error.message.partition(": ")[2]
        return case.name, ms(time.perf_counter() - begin), "", "", "", f"refused: {refused[:90]}"
    compile_seconds, masks, pushes, ended = time.perf_counter() - begin, [], [], ""
    words = np.zeros(-(-model.vocab_size // 32), np.uint32)
    for seed in range(NUM_ANSWERS):
        matcher, rng = compiled.matcher(), random.Random(seed)
        try:
            for _ in range(MOST_TOKENS):
                if matcher.is_complete:
                    break
                begin = time.perf_counter()
                matcher.fill_mask(words)
                masks.append(time.perf_counter() - begin)
                allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
                going_on = allowed[~np.isin(allowed, model.eos)]
                if not len(going_on):
                    break
                begin = time.perf_counter()
                matcher.push(int(rng.choice(going_on)))
                pushes.append(time.perf_counter() - begin)
        except GrammarGivenUp as violation:
            ended = f"ended: {violation}"
    quantiles = np.quantile(masks, [0.5, 0.99, 1])
    return case.name, ms(compile_seconds), *map(ms, quantiles), ended[:90]


def ms(seconds: float) -> str:
    return number(1000 * seconds)


def memory_of_cache(model: Demo) -> Iterator[str]:
    """Yield what 1,000 different schemas, and then 300 regexes whose states explode, leave in memory."""
    grammars = model.grammars()
    words = np.zeros(-(-model.vocab_size // 32), np.uint32)
    before = rss_mib()
    for i in range(NUM_KEPT):
        properties = {**PERSON["properties"], f"own_{i}": {"type": "string"}}
        compiled = grammars.compile(Grammar("json_schema", json.dumps(record(properties))))
        compiled.matcher().fill_mask(words)
    yield f"{NUM_KEPT:,} schemas of seven fields: {rss_mib() - before:,.0f} MiB more"
    for i in range(300):
        matcher, rng = grammars.compile(Grammar("regex", f".*a.{{{200 + i}}}")).matcher(), random.Random(i)
        try:
            for _ in range(25):  # almost up to the limit of states
                matcher.fill_mask(words)
                matcher.push(int(rng.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))))
        except GrammarGivenUp:
            continue
    yield f"after 300 regexes whose states explode: {rss_mib() - before:,.0f} MiB more"


def rss_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 2**20


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None).parse_args()
    model = Demo()
    begin = time.perf_counter()
    model.grammars()
    print(f"start: {ms(time.perf_counter() - begin)} ms")
    head = ("grammar", "compile ms", "mask p50 ms", "p99 ms", "max ms", "")
    print("\n".join(as_markdown([head, *(row(model, case) for case in CASES)])))
    print("\n".join(memory_of_cache(model)))


if __name__ == "__main__":
    main()
