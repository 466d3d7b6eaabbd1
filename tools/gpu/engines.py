"""Measures whole engines: GPT-2 124M with many short answers and prompts, and ragged decodes of a 1B model."""

from __future__ import annotations

import random
import statistics
import string
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from loadtest.intervals import percentile
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Request, TokenChunk, TokenPrompt
from oaiserve.facts.record import StepKind, StepRecord
from tests.models.decoders import real_shape
from tools.bench.floor import DecoderShape, step_work
from tools.engine_load import complete, figures, greedy, random_prompts
from tools.gpu.sections import Target
from tools.gpu.steps import measure_decodes, step_figures
from tools.gpu.workload import Files, blocks_for, files_of, running_engine


def gpt2(target: Target) -> Iterator[dict[str, Any]]:
    """Measure many short answers, and many text prompts with one new token each."""
    with files_of("gpt2-124m", target) as files:
        yield from _many_short(files, target)


def _many_short(files: Files, target: Target) -> Iterator[dict[str, Any]]:
    prompt_tokens = 16
    count, num_tokens, batch, repeats = (8, 8, 4, 1) if target.quick else (256, 64, 64, 5)
    prompts = [random_prompts(count, prompt_tokens, files.spec.vocab_size, seed) for seed in range(2 * repeats + 2)]
    with running_engine(files, max_running=batch, kv_blocks=blocks_for(batch, prompt_tokens + num_tokens)) as engine:
        complete(engine, prompts.pop(), num_tokens)
        engine.take_steps()
        runs = [complete(engine, prompts.pop(), num_tokens) for _ in range(repeats)]
        yield {"batch": batch, "at_once": figures(runs), "steps": step_figures(engine.take_steps(), batch)}
        complete(engine, prompts.pop(), num_tokens, clients=batch)
        runs = [complete(engine, prompts.pop(), num_tokens, clients=batch) for _ in range(repeats)]
        yield {"clients": figures(runs)}

    count, length, batch, repeats = (8, 19, 4, 1) if target.quick else (256, 259, 16, 5)
    generator = random.Random(0)
    texts = [
        ["".join(generator.choices(string.ascii_letters, k=length)) for _ in range(count)] for _ in range(repeats + 1)
    ]
    with running_engine(files, max_running=batch, kv_blocks=blocks_for(batch, length + 1)) as engine:
        complete(engine, texts.pop(), 1)
        runs = [complete(engine, texts.pop(), 1) for _ in range(repeats)]
        yield {"one_token": {"batch": batch, "prompt_tokens": length, **figures(runs)}}


def uneven(target: Target) -> Iterator[dict[str, Any]]:
    """Measure a long sequence among short ones, and prompts that arrive during decodes."""
    with files_of("llama-3.2-1b", target) as files:
        yield from _ragged(files, DecoderShape.of(files.spec, real_shape("llama-3.2-1b", tiny=target.quick)), target)


def _ragged(files: Files, shape: DecoderShape, target: Target) -> Iterator[dict[str, Any]]:
    count, short, long, num_tokens = (4, 16, 48, 8) if target.quick else (64, 300, 65_536, 64)
    arrivals, gap_seconds = (3, 0.01) if target.quick else (60, 0.05)
    most_tokens = 500 if target.quick else 2 * short  # so many that all still decode when the last prompt has come
    kv_blocks = blocks_for(count, short + most_tokens) + blocks_for(2, long + num_tokens)
    with running_engine(files, kv_blocks=kv_blocks, max_running=2 * count, prefix_cache=False) as engine:
        for name, lengths in {"even": [short] * count, "uneven": [long] + [short] * (count - 1)}.items():
            prompts = [random_prompts(1, length, files.spec.vocab_size, seed)[0] for seed, length in enumerate(lengths)]
            found = measure_decodes(engine, prompts, num_tokens, repeats=1)
            middles = [length + num_tokens // 2 for length in lengths]  # lengths halfway through the run
            work = step_work(shape, [(middle - 1, middle) for middle in middles])
            yield {name: {"context": max(lengths), "bytes": work.num_bytes, "operations": work.flops, **found}}
        engine.take_steps()
        prompts = random_prompts(count + arrivals, short, files.spec.vocab_size, seed=7)
        steps = arriving(engine, prompts[:count], prompts[count:], most_tokens, gap_seconds)
        yield {"arrivals": arrival_figures(steps, count)}


def arriving(
    engine: Engine, prompts: list[list[int]], later: list[list[int]], most_tokens: int, gap_seconds: float
) -> list[StepRecord]:
    """Let prompts decode while later ones arrive one after the other, each for one token. Return the steps.

    The first ones end with the last of the later ones, or after `most_tokens`.
    """
    events: SimpleQueue[list[Event]] = SimpleQueue()

    def submit(name: str, prompt: list[int], num_tokens: int) -> str:
        engine.submit(Request(name, (TokenPrompt(prompt),), greedy(num_tokens)), events.put)
        return name

    decoding = {submit(f"decode-{number}", prompt, most_tokens) for number, prompt in enumerate(prompts)}
    begun: set[str] = set()
    while len(begun) < len(decoding):
        begun |= {event.request_id for event in events.get() if isinstance(event, TokenChunk)}
    arrived = set()
    for number, prompt in enumerate(later):
        time.sleep(gap_seconds)
        arrived.add(submit(f"arrival-{number}", prompt, 1))
    left = decoding | arrived
    while left:
        left -= {event.request_id for event in events.get() if isinstance(event, TERMINAL)}
        if left.isdisjoint(arrived):
            for name in left:
                engine.abort(name)
    return engine.take_steps()


def arrival_figures(records: list[StepRecord], count: int) -> dict[str, Any]:
    """Return the periods, in ms, of steps of decodes alone, and of all in which most of the sequences decode."""
    steady, mixed = (
        [(r.duration_ns + r.idle_ns) / 1e6 for r in records if r.kind == kind and r.num_sequences >= count // 2]
        for kind in (StepKind.DECODE, StepKind.MIXED)
    )
    if not steady or not mixed:
        raise RuntimeError(f"There are {len(steady)} steps of decodes, and {len(mixed)} with prompts beside them.")
    median = statistics.median(steady)
    itl_p99_ms = percentile(sorted([*steady, *mixed]), 99)
    return {
        "steps": len(steady) + len(mixed),
        "mixed_steps": len(mixed),
        "steady_ms": median,
        "mixed_p50_ms": statistics.median(mixed),
        "itl_p99_ms": itl_p99_ms,
        "itl_p99_to_steady": itl_p99_ms / median,
    }
