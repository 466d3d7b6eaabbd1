"""Draws answers of the demo model under grammars and checks each one: python -m tools.grammar_walks

There are 40 schemas, some regexes and choices, and 50 seeds for each, at temperature 1.5, through the whole engine. A
finished answer has to be valid for a reference that knows nothing of the server's grammars. One that `max_tokens` has
cut has to be the beginning of a valid one: its tokens are given to a fresh matcher, which brings them to an end on a
short way, and the whole has to be valid.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.grammars.grammar import CompiledGrammar, GrammarGivenUp, GrammarViolation
from oaiserve.engine.request import (
    TERMINAL,
    Event,
    Failed,
    FinishReason,
    Grammar,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenChunk,
)
from tools.grammar_coverage import Vocabulary, demo_vocabulary
from tools.grammar_schemas import CHOICES, REGEXES, SCHEMAS
from tools.json_validity import error_of
from tools.markdown import as_markdown, number, write_json

NUM_SEEDS = 50
MAX_TOKENS = 120
TEMPERATURE = 1.5
AT_ONCE = 8  # grammars
NUM_ENDS = 5  # ways on which a cut answer is brought to an end, until one gets there


@dataclass(frozen=True)
class Case:
    name: str
    grammar: Grammar
    error_of: Callable[[str], str]  # what is wrong with a whole answer; "" if it is right


@dataclass
class Answer:
    """An answer to one request: its text, and why it has ended."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""


@dataclass
class Outcome:
    """What has become of the answers of one case."""

    num_finished: int = 0
    num_cut: int = 0
    num_tokens: int = 0
    failures: list[str] = field(default_factory=list)


def schema_case(name: str, schema: Any) -> Case:
    return Case(name, Grammar("json_schema", json.dumps(schema)), partial(error_of, schema=schema))


def regex_case(name: str, regex: str) -> Case:
    def error(text: str) -> str:
        return "" if re.fullmatch(regex, text, re.ASCII) else f"it does not match {regex}"

    return Case(name, Grammar("regex", regex), error)


def choice_case(name: str, choices: list[str]) -> Case:
    def error(text: str) -> str:
        return "" if text in choices else "it is none of the choices"

    return Case(name, Grammar("choice", json.dumps(choices)), error)


def any_object(text: str) -> str:
    return error_of(text, {"type": "object"})


CASES = [
    *(schema_case(name, schema) for name, schema in SCHEMAS.items()),
    Case("any object", Grammar("json_object", ""), any_object),
    *(regex_case(name, regex) for name, regex in REGEXES.items()),
    *(choice_case(name, choices) for name, choices in CHOICES.items()),
]


def answers(
    engine: Engine, cases: Sequence[Case], prompt: Prompt, num_seeds: int, max_tokens: int
) -> dict[tuple[int, int], Answer]:
    """Draw an answer under each case with each seed, all at once."""
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    found = {(index, seed): Answer() for index in range(len(cases)) for seed in range(num_seeds)}
    for index, seed in found:
        params = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, seed=seed, grammar=cases[index].grammar)
        engine.submit(Request(f"{index} {seed}", (prompt,), params, stream_interval=0), inbox.put)
    num_open = len(found)
    while num_open:
        for event in inbox.get():
            index, seed = map(int, event.request_id.split())
            answer = found[index, seed]
            if isinstance(event, TokenChunk):
                answer.text += event.text
                answer.token_ids += event.token_ids
                answer.finish_reason = event.finish_reason
            elif isinstance(event, Failed):
                answer.error = f"it failed: {event.error}"
            num_open -= isinstance(event, TERMINAL)
    return found


def error_in(answer: Answer, case: Case, vocabulary: Vocabulary, compiled: CompiledGrammar) -> str:
    """Return what is wrong with an answer; "" if it is right."""
    if answer.error:
        return answer.error
    if answer.finish_reason is FinishReason.STOP:
        return case.error_of(answer.text)
    error = ""
    for seed in range(NUM_ENDS):
        try:
            whole = vocabulary.walk(compiled, random.Random(seed), answer.token_ids, num_free=0)
        except (GrammarViolation, GrammarGivenUp, UnicodeDecodeError) as refused:
            return f"it does not go on: {refused!r}"
        # The cut may be within a character, whose first bytes a client gets as U+FFFD.
        if not whole.startswith(answer.text.rstrip("\ufffd")):
            return f"its tokens are not its text, but {whole}"
        if not (error := case.error_of(whole)):
            return ""
    return f"it is not the beginning of a valid one: {error}"


def outcomes(
    engine: Engine, vocabulary: Vocabulary, cases: Sequence[Case], prompt: Prompt, num_seeds: int, max_tokens: int
) -> dict[str, Outcome]:
    """Draw and check the answers of all cases."""
    found = {case.name: Outcome() for case in cases}
    compiled = [vocabulary.compile_grammar(case.grammar) for case in cases]
    for (index, seed), answer in answers(engine, cases, prompt, num_seeds, max_tokens).items():
        case, outcome = cases[index], found[cases[index].name]
        outcome.num_tokens += len(answer.token_ids)
        outcome.num_finished += answer.finish_reason is FinishReason.STOP
        outcome.num_cut += answer.finish_reason is FinishReason.LENGTH
        if error := error_in(answer, case, vocabulary, compiled[index]):
            outcome.failures.append(f"{case.name}, seed {seed}: {answer.text[:300]!r}: {error[:300]}")
    return found


def table(found: dict[str, Outcome]) -> str:
    rows = [("grammar", "finished", "cut", "tokens", "wrong")]
    for name, each in found.items():
        counts = (each.num_finished, each.num_cut, each.num_tokens, len(each.failures))
        rows.append((name, *map(number, counts)))  # type: ignore[arg-type]
    return "\n".join(as_markdown(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--only", default="", help="part of the names of the grammars")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.name]
    options = EngineOptions(max_running=64, max_waiting=AT_ONCE * arguments.seeds)
    prompt = TextPrompt("Here is one example, which is short:\n\n")
    vocabulary, found = demo_vocabulary(), dict[str, Outcome]()
    with Engine.from_pretrained("demo", options) as engine:
        for start in range(0, len(cases), AT_ONCE):
            few = cases[start : start + AT_ONCE]
            found |= outcomes(engine, vocabulary, few, prompt, arguments.seeds, arguments.max_tokens)
            write_json(arguments.json, {name: vars(each) for name, each in found.items()})
            print(f"{len(found)} of {len(cases)} grammars", file=sys.stderr)
    print(table(found))
    total = [sum(getattr(each, name) for each in found.values()) for name in ("num_finished", "num_cut", "num_tokens")]
    failures = [failure for each in found.values() for failure in each.failures]
    print("{:,} answers are finished and {:,} are cut, with {:,} tokens in all.".format(*total))
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
