"""Measures where the time of a step goes, against the floor that the machine allows: python -m tools.bench.step

The steps run in this process, on random tokens and a full KV cache with its blocks in random order. Each step is
repeated, and a time is the mean over the middle half of the repeats.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import textwrap
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from oaiserve.checkpoints import demo
from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions, KVCacheDtype
from oaiserve.engine.decoder.description import matrices_in
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.engine import Engine
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.sampling.sampler import Sampling
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.start.load import config_of
from oaiserve.facts.step_record import StepKind
from oaiserve.system_cpus import default_threads
from oaiserve.system_memory import available_bytes
from tools.bench import floor
from tools.engine_load import complete, greedy, random_step
from tools.markdown import add_publishing, as_markdown, number, publish, results_of

BLOCK_SIZE = 16
CONTEXT = 192  # tokens of a short prompt and half of its answer
BATCHES = (1, 2, 4, 8, 16, 64, 256)
BATCHES_BY_CONTEXT = (1, 64)
CONTEXTS = (512, 2048, 8192)
PROMPTS = (128, 512, 2048)
MEMORY_SHARE = 0.7  # share of the available memory, for the KV cache
LEAST_STEPS = 5
ENGINE_TOKENS = 40  # tokens of each answer, when the engine's own time is measured
ENGINE_BLOCKS = 2048  # blocks for all these answers
LEAST_SHARE = 0.05  # A part of a step has a column if it takes this share of any of the steps.


@dataclass(frozen=True, slots=True)
class Point:
    """A step in which each of `num_sequences` computes the last `num_tokens` of its `context`, and samples."""

    num_sequences: int
    num_tokens: int
    context: int

    @property
    def num_blocks(self) -> int:
        return self.num_sequences * -(-self.context // BLOCK_SIZE)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The tokens of each sequence in the KV cache, and its new ones."""
        return [(self.context - self.num_tokens, self.num_tokens)] * self.num_sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", help="a GGUF file or a folder (default: the demo model)")
    add("--kv-cache-dtype", default="auto", choices=get_args(KVCacheDtype), help="as the server's")
    add("--seconds", type=float, default=0.6, help="time for each point (default 0.6)")
    add_publishing(parser, "decode-step")
    arguments = parser.parse_args()
    results = results_of(arguments, measure)
    publish(arguments, "decode-step", results, report(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    num_threads = default_threads()
    options = EngineOptions(device="cpu", block_size=BLOCK_SIZE, kv_cache_dtype=arguments.kv_cache_dtype)
    model = arguments.model or demo.fetched()
    source = find_model(model)
    spec, decoder, library, *_ = describe_model(source, options)
    assert library is not None
    shape = floor.DecoderShape.of(spec, config_of(source), average_bytes(decoder))
    limits = floor.measure_ceilings(spec.dtype, num_threads)
    points, left_out = choose_points(_most_blocks(spec))
    num_blocks = max(point.num_blocks for kind in points.values() for point in kind)
    native = NativeDecoder(library, decoder, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=num_threads)
    bench = StepBench(spec, native, arguments.seconds)
    results = {
        "model": "The demo model" if arguments.model is None else source.path.name,
        "threads": num_threads,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "ceilings": limits._asdict(),
        "left_out": left_out,
        **{kind: [bench.measure(point, limits, shape) for point in chosen] for kind, chosen in points.items()},
    }
    engine_ms = engine_times_ms(model, points["decode"], kv_cache_dtype=arguments.kv_cache_dtype)
    results["decode"] = [row | {"engine_ms": ms} for row, ms in zip(results["decode"], engine_ms, strict=True)]
    return results


def average_bytes(part: object) -> float:
    """Return the bytes of a weight of a decoder, on average, because the matrices of a file have several formats."""
    weights = [matrix.weight for matrix in matrices_in(part)]
    return sum(weight.nbytes for weight in weights) / sum(math.prod(weight.shape) for weight in weights)


def choose_points(most_blocks: int) -> tuple[dict[str, list[Point]], list[str]]:
    """Return the points by kind, and names of those that are left out because the KV cache would not fit."""
    points = {
        "decode": [Point(batch, 1, CONTEXT) for batch in BATCHES],
        "context": [Point(batch, 1, context) for batch in BATCHES_BY_CONTEXT for context in CONTEXTS],
        "prefill": [Point(1, tokens, tokens) for tokens in PROMPTS],
    }
    left_out = [f"{p.num_sequences} x {p.context}" for p in points["context"] if p.num_blocks > most_blocks]
    return {kind: [p for p in chosen if p.num_blocks <= most_blocks] for kind, chosen in points.items()}, left_out


def _most_blocks(spec: ModelSpec) -> int:
    return int(MEMORY_SHARE * available_bytes() / (spec.kv_bytes_per_token * BLOCK_SIZE))


class StepBench:
    def __init__(self, spec: ModelSpec, native: NativeDecoder, seconds: float) -> None:
        self._spec = spec
        self._native = native
        self._seconds = seconds
        self._num_filled = 0
        self._random = random.Random(0)

    def measure(self, point: Point, limits: floor.Ceilings, shape: floor.DecoderShape) -> dict[str, Any]:
        """Return the time of the step, of its parts, and the floors of both, in ms."""
        times_ms = middle(self.run(point))
        chunks = [(start, start + num_tokens) for start, num_tokens in point.lengths]
        work = floor.step_work(shape, chunks)
        return asdict(point) | {
            "step_ms": times_ms.pop("step"),
            "floor_ms": work.seconds(limits) * 1e3,
            "reading_ms": work.num_bytes / limits.bytes_per_second * 1e3,
            "parts_ms": times_ms,
            "floors_ms": {name: part.seconds(limits) * 1e3 for name, part in floor.work(shape, chunks).items()},
        }

    @torch.inference_mode()
    def run(self, point: Point) -> list[dict[str, float]]:
        """Repeat the step, and return the seconds of each repeat and of its parts, after a warm-up."""
        self._fill(point.num_blocks)
        step = random_step(point.lengths, BLOCK_SIZE, self._spec.vocab_size, self._random)
        rows: list[dict[str, float]] = []
        give_up = 0.0
        while len(rows) < LEAST_STEPS + 2 or time.perf_counter() < give_up:
            before = self._native.durations_seconds()
            started = time.perf_counter()
            batch = build_batch(step, BLOCK_SIZE, self._spec.device)
            built = time.perf_counter()
            logits = self._native.forward(batch)
            computed = time.perf_counter()
            Sampling(logits, step.chunks).wait()
            ended = time.perf_counter()
            after = self._native.durations_seconds()
            operations = {name: after[name] - before[name] for name in after}
            rows.append(
                {"step": ended - started, "batch": built - started}
                | operations
                | {"call": computed - built - sum(operations.values()), "sample": ended - computed}
            )
            if len(rows) == 2:  # the first two are the warm-up
                give_up = time.perf_counter() + self._seconds
        return rows[2:]

    def _fill(self, num_blocks: int) -> None:
        """Fill the KV cache with random numbers. Pages that were never written to are all the same page, which would
        stay in the CPU's caches."""
        if num_blocks > self._num_filled:
            for cache in self._native.caches:
                for blocks in cache:
                    new = blocks[self._num_filled : num_blocks]
                    if blocks.dtype == torch.int8:
                        new.fill_(0x3D)  # four such bytes are a scale of 0.046
                    else:
                        new.copy_(torch.randn(blocks.shape[1:]))
            self._num_filled = num_blocks


def middle(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return means in ms over the middle half of the steps, from rows of seconds. The parts add up to the step."""
    ordered = sorted(rows, key=lambda row: row["step"])
    rows = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return {name: statistics.fmean(row[name] for row in rows) * 1e3 for name in rows[0]}


def engine_times_ms(model: str | Path, points: list[Point], **options: Any) -> list[float | None]:
    """Measure the engine thread's own time between two decode steps: scheduling, text, stop conditions, events.

    The sequences are choices of one prompt, so that up to 128 begin at once and share blocks. It is None for a step
    that never had all of them: on a slow CPU, the first of more sequences end before the last ones begin.
    """
    medians: list[float | None] = []
    with Engine.from_pretrained(model, drafts="off", kv_blocks=ENGINE_BLOCKS, **options) as engine:
        prompt = [(7 * i + 3) % engine.vocab_size for i in range(CONTEXT)]
        for point in points:
            choices = replace(greedy(ENGINE_TOKENS), n=point.num_sequences)
            complete(engine, [prompt], point.num_sequences * ENGINE_TOKENS, params=choices)
            own_ns = [
                record.idle_ns
                for record in engine.take_steps()
                if record.kind == StepKind.DECODE and record.num_sequences == point.num_sequences
            ]
            medians.append(statistics.median(own_ns) / 1e6 if own_ns else None)
    return medians


def report(results: dict[str, Any]) -> str:
    limits = results["ceilings"]
    cache = "" if results.get("kv_cache_dtype", "auto") == "auto" else f" and an {results['kv_cache_dtype']} KV cache"
    about = (
        f"{results['machine']}; {results['created']}. "
        f"{results.get('model', 'The demo model')} in {results['dtype']}{cache}, {results['threads']} threads. "
        f"Memory was read at {limits['bytes_per_second'] / 1e9:.0f} GB/s, matrices were multiplied at "
        f"{limits['flops_per_second'] / 1e9:.0f} GFLOP/s."
    )
    lines = [textwrap.fill(about, 120)]
    if decode := results["decode"]:
        decode = with_rest(with_prompt_rate(decode, results["prefill"]))
        about = (
            f"A decode step by its sequences, of {decode[0]['context']} tokens each. Times in ms. It takes at least as "
            "long as to read its weights and cache (reading), and to compute its tokens as fast as those of a prompt "
            "(computing); the step by the larger of both is `x larger`."
        )
        lines += [
            "",
            textwrap.fill(about, 120),
            "",
            *_table(decode, ["sequences"], ["reading", "computing", "x larger", *decode[0]["parts_ms"], "engine"]),
        ]
    # A context changes only the time of attention.
    if context := results["context"]:
        lines += ["", "By context:", "", *_table(context, ["sequences", "context"], ["attention"])]
    if prefill := results["prefill"]:
        lines += ["", "A prompt in one step:", "", *_table(prefill, ["tokens"], ["attention"])]
    if results["left_out"]:
        lines += ["", f"Left out, since the KV cache would not fit into memory: {', '.join(results['left_out'])}."]
    return "\n".join(lines)


def with_prompt_rate(decode: list[dict[str, Any]], prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the decode steps with the time that their tokens take in the fastest of these prompts."""
    token_ms = min(row["step_ms"] / row["num_tokens"] for row in prompts)
    return [row | {"computing_ms": row["num_sequences"] * token_ms} for row in decode]


def with_rest(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps with their large parts, and the sum of all others as `rest`."""
    of_steps = [(row["parts_ms"], row["step_ms"]) for row in steps]
    large = [name for name in of_steps[0][0] if any(parts[name] >= LEAST_SHARE * ms for parts, ms in of_steps)]
    return [
        row
        | {
            "parts_ms": {name: parts[name] for name in large}
            | {"rest": sum(parts.values()) - sum(parts[name] for name in large)}
        }
        for row, (parts, _) in zip(steps, of_steps, strict=True)
    ]


def _table(rows: list[dict[str, Any]], keys: list[str], parts: list[str]) -> list[str]:
    table = [[*keys, "step", "x floor", "tokens/s", *parts]]
    for row in rows:
        sizes = {"sequences": row["num_sequences"], "context": row["context"], "tokens": row["num_tokens"]}
        parts_ms = row["parts_ms"] | {name: row.get(f"{name}_ms") for name in ("reading", "computing", "engine")}
        if "computing_ms" in row:
            parts_ms["x larger"] = row["step_ms"] / max(row["reading_ms"], row["computing_ms"])
        speed = row["num_sequences"] * row["num_tokens"] / row["step_ms"] * 1e3
        whole = [f"**{row['step_ms']:.2f}**", f"{row['step_ms'] / row['floor_ms']:.2f}", number(speed)]
        table.append([*(f"{sizes[key]:,}" for key in keys), *whole, *(_cell(parts_ms[name]) for name in parts)])
    return as_markdown(table)


def _cell(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f}"


if __name__ == "__main__":
    main()
