"""Measures what drafts bring for one client, by kind of text: python -m tools.bench.drafts

Each request is answered twice in turns, with drafts and without. The table has the median time of a token, what drafts
make of it, and how many of their tokens came true. That both answers are the same is checked, and counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Finished, Request, SamplingParams, TextPrompt, TokenChunk
from oaiserve.facts.times import monotonic_ns
from tools.bench import machine
from tools.markdown import as_markdown, publish
from tools.paired import interval, measure_pairs

WARM_UP_TOKENS = 64
MOST_WARM_UPS = 100

_CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
    if shape.kind == "rectangle":
        return shape.width * shape.height
    raise ValueError("unknown kind of shape: " + shape.kind)


def perimeter(shape):
    if shape.kind == "circle":
        return 2 * 3.14159 * shape.radius
    if shape.kind == "square":
        return 4 * shape.side
    if shape.kind == "rectangle":
        return 2 * (shape.width + shape.height)
    raise ValueError("unknown kind of shape: " + shape.kind)
"""
_STORY = (
    "The lighthouse stood at the end of a long spit of sand, and nobody had lived in it for twenty years. In winter, "
    "waves went over the road, so that the village forgot it until spring. Then, one evening, its lamp was lit. "
    "The baker saw it first, and he told the teacher, and the teacher told the priest, who did not believe a word."
)
_WORDS = ("ash", "bell", "cloud", "door", "ember", "field", "gate", "harbour", "iron", "juniper", "kettle", "lantern")
_ORDERS = [
    {"id": i, "name": name, "tags": ["new", "paid"], "price": {"amount": 100 + 7 * i, "currency": "EUR"}}
    for i, name in enumerate(_WORDS[:8])
]


def _as_json(currency: str) -> str:
    return json.dumps(_ORDERS, indent=2).replace("EUR", currency)


_EDITED = _CODE.replace("3.14159", "math.pi").replace("def area", "import math\n\n\ndef area")
# A prompt is text that the model goes on with: a small model follows a beginning better than an instruction.
PROMPTS = {
    "code edit": f"Old file:\n```python\n{_CODE}```\nNew file, with `math.pi`:\n```python\n{_EDITED[:120]}",
    "quote": f"{_STORY}\n\nThe same text again, word for word:\n\n{_STORY[:60]}",
    "JSON edit": f"Orders:\n{_as_json('EUR')}\nThe same orders in dollars:\n{_as_json('USD')[:290]}",
    "JSON": f"A long list of orders:\n{_as_json('EUR')[:400]}",
    "chat": "User: How does a bicycle stay upright when it is ridden?\nAssistant: That is a good question.",
}


class Case(NamedTuple):
    kind: str
    temperature: float

    def prompt(self, seed: int) -> TextPrompt:
        if self.kind != "random words":
            # The number keeps each prompt from being the one before.
            return TextPrompt(f"# {seed}\n{PROMPTS[self.kind]}")
        rng = random.Random(seed)
        return TextPrompt(" ".join(rng.choice(_WORDS) + str(rng.randrange(10**4)) for _ in range(48)))


CASES = (
    *(Case(kind, 0.0) for kind in PROMPTS),
    *(Case(kind, 0.7) for kind in PROMPTS),
    Case("random words", 1.0),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and how long its tokens took after the first one."""

    token_ids: list[int]
    ms_per_token: float
    num_draft_tokens: int
    num_accepted_tokens: int


class Measured(NamedTuple):
    pairs: list[tuple[Answer, Answer]]  # with drafts, and without


def ask(engine: Engine, prompt: TextPrompt, *, temperature: float, num_tokens: int) -> Answer:
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=1, ignore_eos=True)
    token_ids: list[int] = []
    began_ns = 0
    for event in engine.stream(Request("measured", (prompt,), params)):
        if isinstance(event, TokenChunk):
            token_ids += event.token_ids
            began_ns = began_ns or monotonic_ns()
            ended_ns = monotonic_ns()
    assert isinstance(event, Finished)
    account = event.account
    ms_per_token = (ended_ns - began_ns) / 1e6 / (len(token_ids) - 1)
    return Answer(token_ids, ms_per_token, account.num_draft_tokens, account.num_accepted_tokens)


def measure(case: Case, with_drafts: Engine, without: Engine, *, num_pairs: int, num_tokens: int) -> Measured:
    """Measure pairs of the same prompt, in turns."""

    def run(engine: Engine, seed: int) -> Answer:
        return ask(engine, case.prompt(seed // 2), temperature=case.temperature, num_tokens=num_tokens)

    return Measured(measure_pairs(lambda seed: run(with_drafts, seed), lambda seed: run(without, seed), num_pairs))


def rows(measured: dict[Case, Measured]) -> Iterator[list[str]]:
    for case, (pairs,) in measured.items():
        drafted = sum(one.num_draft_tokens for one, _ in pairs)
        accepted = sum(one.num_accepted_tokens for one, _ in pairs)
        num_tokens = sum(len(one.token_ids) for one, _ in pairs)
        yield [
            f"{case.kind}, temperature {case.temperature:g}",
            f"{statistics.median(other.ms_per_token for _, other in pairs):.2f}",
            f"{statistics.median(one.ms_per_token for one, _ in pairs):.2f}",
            interval([other.ms_per_token / one.ms_per_token for one, other in pairs]),
            f"{drafted / num_tokens:.0%}",
            f"{accepted / drafted:.0%}" if drafted else "none",
            f"{accepted / num_tokens:.0%}",
            f"{sum(one.token_ids == other.token_ids for one, other in pairs)} of {len(pairs)}",
        ]


HEADER = [
    *("text", "ms/token without", "with", "times as fast", "drafted", "came true", "of the answer", "same answers"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    engines = [
        Engine.from_pretrained(arguments.model, EngineOptions(device="cpu", dtype=arguments.dtype, drafts=drafts))
        for drafts in ("lookup", "off")
    ]
    measured: dict[Case, Measured] = {}
    with engines[0], engines[1]:
        for engine in engines:
            _wait_for_full_speed(engine)
        for case in CASES:
            measured[case] = measure(case, *engines, num_pairs=arguments.pairs, num_tokens=arguments.tokens)
            print(*next(rows({case: measured[case]})), sep=" | ", file=sys.stderr, flush=True)
    pairs = {f"{case.kind}, {case.temperature:g}": found.pairs for case, found in measured.items()}
    figures = {name: [[asdict(one) for one in pair] for pair in found] for name, found in pairs.items()}
    text = "\n".join([machine.sentence(), "", *as_markdown([HEADER, *rows(measured)])])
    publish(arguments, "drafts", {"machine": machine.sentence(), "pairs": figures}, text)


def _wait_for_full_speed(engine: Engine) -> None:
    """Ask until the native step has replaced the slower code that runs at first, and then once more."""
    for number in range(MOST_WARM_UPS):
        was_exact = engine._loop._runner.is_exact
        ask(engine, TextPrompt(f"{number} " * 8), temperature=1.0, num_tokens=WARM_UP_TOKENS)
        if was_exact:
            return
    raise SystemExit("The native step does not come: see the log.")


if __name__ == "__main__":
    main()
