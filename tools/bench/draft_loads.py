"""Measures drafts for several sequences, for large models and with draft models: python -m tools.bench.draft_loads

Each request is answered twice in turns by the same server, with drafts and without. `--part batches` has the demo model
with up to 31 sequences, `--part large` a model of another shape with random weights, and `--part model` draft models.
The pairs of the latter are made (`draft_pairs.py`): no trained pair is at hand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Event, Finished, Request, SamplingParams, TokenChunk
from oaiserve.facts.times import monotonic_ns
from tools.bench import machine
from tools.bench.draft_pairs import save_deepened, save_random, save_shortened
from tools.bench.drafts import Case
from tools.markdown import as_markdown, publish
from tools.paired import interval, measure_pairs

SIZES = (2, 4, 8, 16, 31)
REPEATING = (Case("quote", 0.0), Case("JSON", 0.0))
RANDOM = Case("random words", 1.0)
TEXTS = (Case("JSON", 0.0), Case("chat", 0.7), RANDOM)
NUM_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one request, and how long a token of each of them took after the first ones."""

    token_ids: list[list[int]]
    ms_per_token: float
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one row is about: an engine, and what it is asked."""

    name: str
    engine: Engine
    case: Case
    size: int
    num_pairs: int
    num_tokens: int


def ask(work: Work, seed: int, *, with_drafts: bool) -> Answers:
    loop = work.engine._loop
    drafts, loop._drafts = loop._drafts, loop._drafts if with_drafts else None  # the engine thread has nothing to do
    prompts = tuple(work.case.prompt(1000 * seed + index) for index in range(work.size))
    params = SamplingParams(max_tokens=work.num_tokens, temperature=work.case.temperature, seed=1, ignore_eos=True)
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    token_ids: list[list[int]] = [[] for _ in prompts]
    began_ns = ended_ns = num_before = 0
    work.engine.submit(Request(f"{seed}", prompts, params), inbox.put)
    event: Event | None = None
    while not isinstance(event, Finished):
        for event in inbox.get():
            if isinstance(event, TokenChunk):
                token_ids[event.index] += event.token_ids
        ended_ns = monotonic_ns()
        if not began_ns and all(token_ids):
            began_ns, num_before = ended_ns, sum(map(len, token_ids))
    loop._drafts = drafts
    num_after = sum(map(len, token_ids)) - num_before
    ms_per_token = (ended_ns - began_ns) / 1e6 / (num_after / work.size)
    return Answers(token_ids, ms_per_token, event.account.num_draft_tokens, event.account.num_accepted_tokens)


def measure(work: Work) -> list[tuple[Answers, Answers]]:
    return measure_pairs(
        lambda seed: ask(work, seed // 2, with_drafts=True),
        lambda seed: ask(work, seed // 2, with_drafts=False),
        work.num_pairs,
    )


HEADER = ["text", "sequences", "ms/token without", "with", "times as fast", "drafted", "came true", "same answers"]


def row(work: Work, pairs: list[tuple[Answers, Answers]]) -> list[str]:
    drafted, accepted = (
        sum(getattr(one, name) for one, _ in pairs) for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    num_tokens = sum(len(ids) for one, _ in pairs for ids in one.token_ids)
    same = sum(one.token_ids == other.token_ids for one, other in pairs)
    return [
        f"{work.name}, temperature {work.case.temperature:g}",
        f"{work.size}",
        f"{statistics.median(other.ms_per_token for _, other in pairs):.2f}",
        f"{statistics.median(one.ms_per_token for one, _ in pairs):.2f}",
        interval([other.ms_per_token / one.ms_per_token for one, other in pairs]),
        f"{drafted / num_tokens:.0%}",
        f"{accepted / drafted:.0%}" if drafted else "none",
        f"{same} of {len(pairs)}",
    ]


def engine_of(model: str | Path, draft_model: Path | str | None = None) -> Engine:
    draft = None if draft_model is None else str(draft_model)
    engine = Engine.from_pretrained(model, EngineOptions(device="cpu", draft_model=draft, kv_blocks=1024))
    engine.start()
    case = Case("chat", 0.0)
    while not engine._loop._runner.is_exact:  # slower code runs until the native step is there
        ask(Work("", engine, case, 1, 1, 16), 0, with_drafts=False)
    return engine


def warm_up(engine: Engine, case: Case) -> None:
    """Let the engine find out how good its draft model is."""
    for number in range(NUM_WARM_UPS):
        ask(Work("", engine, case, 1, 1, 64), -1 - number, with_drafts=True)


def batches(num_pairs: int, folder: Path) -> Iterator[Work]:
    engine = engine_of("demo")
    for case in (*REPEATING, RANDOM):
        for size in SIZES:
            yield Work(case.kind, engine, case, size, num_pairs, 48)


def large(num_pairs: int, folder: Path) -> Iterator[Work]:
    save_random(folder / "main", "llama-3.2-1b")
    save_random(folder / "draft", "llama-3.2-1b", num_layers=2)
    engine = engine_of(folder / "main", folder / "draft")
    assert engine._loop._drafts is not None
    model, engine._loop._drafts.model = engine._loop._drafts.model, None
    yield Work("random weights", engine, RANDOM, 1, num_pairs, 48)
    engine._loop._drafts.model = model
    warm_up(engine, RANDOM._replace(temperature=0.0))
    yield Work(
        "random weights, with a draft model",
        engine,
        RANDOM._replace(temperature=0.0),
        1,
        num_pairs,
        48,
    )


def models(num_pairs: int, folder: Path) -> Iterator[Work]:
    save_deepened(folder / "equal", times=5, noise=0.0)
    save_deepened(folder / "alike", times=5, noise=NOISE)
    save_shortened(folder / "bad", num_layers=6)
    for name, main, draft in (
        ("always right", folder / "equal", "demo"),
        ("often right", folder / "alike", "demo"),
        ("hardly ever right", folder / "equal", folder / "bad"),
    ):
        engine = engine_of(main, draft)
        warm_up(engine, RANDOM)
        for case in TEXTS:
            yield Work(f"{case.kind}, {name}", engine, case, 1, num_pairs, 64)
        engine.stop()


NOISE = 0.1
PARTS: dict[str, Callable[[int, Path], Iterator[Work]]] = {"batches": batches, "large": large, "model": models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    figures: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for work in PARTS[arguments.part](arguments.pairs, Path(folder)):
            pairs = measure(work)
            rows.append(row(work, pairs))
            figures.append({"row": rows[-1], "pairs": [[asdict(one) for one in pair] for pair in pairs]})
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    text = "\n".join([machine.sentence(), "", *as_markdown([HEADER, *rows])])
    publish(arguments, f"drafts-{arguments.part}", {"machine": machine.sentence(), "rows": figures}, text)


if __name__ == "__main__":
    main()
