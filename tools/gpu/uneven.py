"""Measures ragged decodes: a long sequence among short ones, and prompts that arrive beside decodes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Request, TokenChunk, TokenPrompt
from oaiserve.facts.record import StepKind, StepRecord
from tools.engine_load import greedy, percentile, random_prompts
from tools.gpu.parts import measure_decodes
from tools.gpu.steps import weight_bytes
from tools.gpu.target import Target
from tools.gpu.workload import blocks_for, load, running_engine

MODEL = "llama-3.2-1b"


def run(target: Target) -> Iterator[dict[str, Any]]:
    loaded = load(MODEL, target)
    weights, kv_bytes = weight_bytes(loaded.model), loaded.kv_bytes_per_token
    count, short, long, num_tokens = (4, 16, 48, 8) if target.quick else (64, 300, 65_536, 64)
    arrivals, gap_seconds = (3, 0.01) if target.quick else (60, 0.05)
    most_tokens = 500 if target.quick else 2 * short  # so many that all still decode when the last prompt has come
    kv_blocks = blocks_for(count, short + most_tokens) + blocks_for(2, long + num_tokens)
    with running_engine(loaded, kv_blocks=kv_blocks, max_running=2 * count, prefix_cache=False) as engine:
        for name, lengths in {"even": [short] * count, "uneven": [long] + [short] * (count - 1)}.items():
            prompts = [random_prompts(1, length, loaded.vocab_size, seed)[0] for seed, length in enumerate(lengths)]
            found = measure_decodes(engine, prompts, num_tokens, repeats=1)
            num_bytes = weights + kv_bytes * sum(length + num_tokens // 2 for length in lengths)
            yield {name: {"context": max(lengths), "bytes": num_bytes, **found}}
        engine.take_steps()
        steps = arriving(engine, loaded.vocab_size, count, short, most_tokens, arrivals, gap_seconds)
        yield {"arrivals": arrival_figures(steps, count)}


def arriving(
    engine: Engine, vocab_size: int, count: int, length: int, most_tokens: int, arrivals: int, gap_seconds: float
) -> list[StepRecord]:
    """Let `count` sequences decode while prompts arrive one after the other, each for one token. Return the steps.

    The sequences end with the last of these prompts, or after `most_tokens`.
    """
    events: SimpleQueue[list[Event]] = SimpleQueue()
    prompts = random_prompts(count + arrivals, length, vocab_size, seed=7)
    decoding = [f"decode-{number}" for number in range(count)]
    arriving = [f"arrival-{number}" for number in range(arrivals)]
    for name, prompt in zip(decoding, prompts, strict=False):
        engine.submit(Request(name, (TokenPrompt(prompt),), greedy(most_tokens)), events.put)
    begun: set[str] = set()
    while len(begun) < count:
        begun |= {event.request_id for event in events.get() if isinstance(event, TokenChunk)}
    for name, prompt in zip(arriving, prompts[count:], strict=True):
        time.sleep(gap_seconds)
        engine.submit(Request(name, (TokenPrompt(prompt),), greedy(1)), events.put)
    left = {*decoding, *arriving}
    while left:
        left -= {event.request_id for event in events.get() if isinstance(event, TERMINAL)}
        if left.isdisjoint(arriving):
            for name in left:
                engine.abort(name)
    return engine.take_steps()


def arrival_figures(records: list[StepRecord], count: int) -> dict[str, Any]:
    """Return the periods, in ms, of steps of decodes alone, and of all in which most of the sequences decode."""
    periods = {
        kind: [(r.duration_ns + r.idle_ns) / 1e6 for r in records if r.kind == kind and r.num_sequences >= count // 2]
        for kind in (StepKind.DECODE, StepKind.MIXED)
    }
    steady, mixed = periods[StepKind.DECODE], periods[StepKind.MIXED]
    if not steady or not mixed:
        raise RuntimeError(f"There are {len(steady)} steps of decodes, and {len(mixed)} with prompts beside them.")
    median = statistics.median(steady)
    return {
        "steps": len(steady) + len(mixed),
        "mixed_steps": len(mixed),
        "steady_ms": median,
        "mixed_p50_ms": statistics.median(mixed),
        "itl_p99_ms": percentile([*steady, *mixed], 0.99),
        "itl_p99_to_steady": percentile([*steady, *mixed], 0.99) / median,
    }
