"""Measures the steps of a model: decodes in the engine, prompts and mixed steps one after the other, and their kernels,
beside what torch's own kernels need for the same work.

Times come from the engine's own records, which use the device's clock on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from loadtest.intervals import percentile
from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.start.started import Started, assemble
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.step_record import HostPart, StepKind, StepRecord
from oaiserve.runtime import THREADS
from tests.models.decoders import byte_tokenizer, real_shape
from tools.bench.floor import DecoderShape, step_work
from tools.engine_load import complete, random_prompts, random_step
from tools.gpu import reference
from tools.gpu.models import described_on
from tools.gpu.parts import in_turn
from tools.gpu.profiles import needed, profiled
from tools.gpu.sections import Target
from tools.gpu.workload import BLOCK_SIZE, blocks_for, release, started

# Sections hold their models side by side, and each has a KV cache of its own.
UTILIZATION = 0.97


class Sizes:
    """How much of each is measured."""

    def __init__(self, *, quick: bool) -> None:
        self.batches = (2, 1, 4) if quick else (64, 1, 256, 16, 128, 8, 32)
        self.context = 40 if quick else 512
        self.new_tokens = 16 if quick else 128
        self.chunk = 16 if quick else 2048
        self.earlier = 48 if quick else 6144
        self.mixed_rows = (2, 3) if quick else (64, 128, 255)  # with the prompt, at most as many as may run
        self.mixed_tokens = (3, 8) if quick else (100, 400, 800)
        self.long = 80 if quick else 65_536
        self.steps = 3 if quick else 10

    @property
    def most(self) -> int:
        return max(self.batches)

    @property
    def starts(self) -> range:
        """Return where the chunks of a long prompt begin."""
        return range(0, self.earlier + 1, self.chunk)

    @property
    def few(self) -> int:
        return max(2, self.most // 4)

    @property
    def kv_blocks(self) -> int:
        """Return the blocks that the largest of all needs."""
        mixed = blocks_for(self.most, self.context) + blocks_for(1, max(self.mixed_tokens))
        return max(
            mixed, blocks_for(self.most, self.context + self.new_tokens // 2), blocks_for(1, self.long) + mixed // 4
        )


def run(target: Target, model: str) -> Iterator[dict[str, Any]]:
    sizes = Sizes(quick=target.quick)
    config = real_shape(model, tiny=target.quick)
    described = described_on(config, target.device)
    shape = DecoderShape.of(described.spec, config)
    matrices = reference.matrix_shapes(described.decoder)
    spec = described.spec
    options = EngineOptions(
        compile=not spec.is_on_cpu,
        kv_blocks=sizes.kv_blocks,
        max_running=sizes.most,
        max_step_tokens=max(sizes.chunk, sizes.most, max(sizes.mixed_tokens) + max(sizes.mixed_rows)),
        prefix_cache=False,
        gpu_memory_utilization=UTILIZATION,
    )
    began = time.perf_counter()
    made = started(described, options, target)
    del described
    release()
    weight_bytes = step_work(shape, [(0, 1)]).num_bytes
    about = {"model": model, "weight_bytes": weight_bytes, "kv_bytes_per_token": spec.kv_bytes_per_token}
    yield about | {"seconds_to_ready": time.perf_counter() - began}
    yield from in_turn(
        {
            "reference": lambda: references(matrices, shape, spec.dtype, sizes, target),
            "decode": lambda: decodes(made, options, shape, sizes, target),
            "steps": lambda: other_steps(made.runner, shape, sizes, target),
            "profiles": lambda: profiles(made.runner, shape, sizes, target),
            "attention": lambda: attentions(shape, sizes, spec.kv_shapes[0].key_dim, target),
        }
    )


def references(
    matrices: list[list[tuple[int, int]]], shape: DecoderShape, dtype: torch.dtype, sizes: Sizes, target: Target
) -> Iterator[dict[str, Any]]:
    """Yield the times of a step's products alone, by rows, and of copies that move as many bytes as decodes read."""
    rows: list[dict[str, Any]] = []
    with target.turn():
        products = reference.Products(matrices, dtype, target.device)
        for batch in sorted(sizes.batches):
            least = step_work(shape, [(sizes.context - 1, sizes.context)] * batch)
            copied = reference.copy_seconds(least.num_bytes, target.device, *([1 << 16] if target.quick else []))
            found = {"rows": batch, "products_ms": 1e3 * products.seconds(batch, batch), "copy_ms": 1e3 * copied}
            rows.append(found)
            yield {"reference": rows}
        for number in sorted(
            {sizes.chunk, *(one + of_prompt for one in sizes.mixed_rows for of_prompt in sizes.mixed_tokens)}
        ):
            rows.append({"rows": number, "products_ms": 1e3 * products.seconds(number, min(number, sizes.most))})
        yield {"reference": rows}
    del products
    release()


def decodes(
    made: Started, options: EngineOptions, shape: DecoderShape, sizes: Sizes, target: Target
) -> Iterator[dict[str, Any]]:
    """Yield the decode steps of each batch in a running engine."""
    vocab_size = made.spec.vocab_size
    prompt_len = sizes.context - sizes.new_tokens // 2  # then a sequence has `context` tokens on average
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        with target.starting():
            served = assemble(made, Tokenizer(byte_tokenizer(vocab_size)), options, THREADS)
            engine = stack.enter_context(Engine(EngineParts.of(served, options)))
            complete(engine, random_prompts(2, prompt_len, vocab_size), 4)
        for batch in sizes.batches:
            with target.turn():
                engine.take_steps()
                complete(engine, random_prompts(batch, prompt_len, vocab_size), sizes.new_tokens)
                found = step_figures(engine.take_steps(), batch)
            least = step_work(shape, [(sizes.context - 1, sizes.context)] * batch)
            rows.append({"context": sizes.context, "bytes": least.num_bytes, "operations": least.flops, **found})
            yield {"decode": rows}


def step_figures(records: Sequence[StepRecord], batch: int) -> dict[str, Any]:
    """Return figures, in ms, of the steps in which `batch` sequences decode.

    The period is from the end of a step to the end of the next one. The gap is the part of it in which the device is
    idle. `host_ms` has medians of what the engine thread did between the results of two steps, part by part.
    """
    steps = [record for record in records if record.kind == StepKind.DECODE and record.num_sequences == batch]
    if not steps:
        raise RuntimeError(f"No step had {batch} sequences that decode, of {len(records)}.")
    periods = sorted((record.duration_ns + record.idle_ns) / 1e6 for record in steps)
    gaps = [record.idle_ns / 1e6 for record in steps]
    return {
        "sequences": batch,
        "steps": len(steps),
        "period_ms": statistics.median(periods),
        "period_p10_ms": percentile(periods, 10),
        "period_p90_ms": percentile(periods, 90),
        "device_ms": statistics.median(record.duration_ns / 1e6 for record in steps),
        "gap_ms": statistics.median(gaps),
        "gap_share": sum(gaps) / sum(periods),
        "host_ms": {
            part.value: statistics.median(step.host_ns.get(part, 0) for step in steps) / 1e6
            for part in HostPart
            if part != HostPart.IDLE
        },
    }


def other_steps(runner: ModelRunner, shape: DecoderShape, sizes: Sizes, target: Target) -> Iterator[dict[str, Any]]:
    """Yield steps with prompts, each launched while the one before is computed, and by itself: mixed ones, the chunks
    of a prompt, and decodes of which one sequence is long."""
    lengths: dict[str, list[tuple[int, int]]] = {}
    decode = (sizes.context - 1, 1)
    for rows in sizes.mixed_rows:
        for tokens in sizes.mixed_tokens:
            lengths[f"{rows} decodes, {tokens} prompt tokens"] = [decode] * rows + [(0, tokens)]
    chunks = {f"{sizes.chunk} prompt tokens behind {start}": [(start, sizes.chunk)] for start in sizes.starts}
    lengths |= chunks
    lengths[f"{sizes.few} decodes, one at {sizes.long}"] = [(sizes.long - 1, 1)] + [decode] * (sizes.few - 1)
    found: dict[str, dict[str, Any]] = {}
    for name, of_step in lengths.items():
        step = random_step(of_step, BLOCK_SIZE, shape.vocab)
        least = step_work(shape, [(start, start + new) for start, new in of_step])
        about = {
            "sequences": len(of_step),
            "tokens": step.num_tokens,
            "bytes": least.num_bytes,
            "operations": least.flops,
        }
        with target.turn():
            timed_steps(runner, [step] * 2, overlaps=True)
            overlapped = timed_steps(runner, [step] * sizes.steps, overlaps=True)
            alone = timed_steps(runner, [step] * max(2, sizes.steps // 2), overlaps=False)
        found[name] = about | overlapped | {"alone_ms": alone["period_ms"]}
        yield {"steps": found}
    of_chunks = [found[name] for name in chunks]
    whole = {key: sum(one[key] for one in of_chunks) for key in of_chunks[0] if key != "sequences"}
    found[f"prompt of {whole['tokens']}, {len(of_chunks)} steps"] = {"sequences": 1, **whole}
    yield {"steps": found}


def timed_steps(runner: ModelRunner, steps: Sequence[Step], *, overlaps: bool) -> dict[str, Any]:
    """Return medians, in ms, of steps that are launched as the engine does with overlap, or without.

    The period is from the results of a step to those of the next one. `launch_ms` is the host's time to launch.
    """
    launched: list[float] = []
    device_ns: list[int | None] = []
    ended = [time.perf_counter()]
    in_flight: list[Any] = []

    def collect() -> None:
        device_ns.append(runner.collect(in_flight.pop(0)).device_ns)
        ended.append(time.perf_counter())

    for step in steps:
        began = time.perf_counter()
        in_flight.append(runner.launch(step))
        launched.append(time.perf_counter() - began)
        if len(in_flight) > overlaps:
            collect()
    while in_flight:
        collect()
    periods = [end - begin for begin, end in pairwise(ended)][1:] or [ended[1] - ended[0]]
    period_ms = 1e3 * statistics.median(periods)
    by_device = [ns / 1e6 for ns in device_ns if ns is not None]
    return {
        "device_ms": statistics.median(by_device) if by_device else period_ms,
        "launch_ms": 1e3 * statistics.median(launched),
        "period_ms": period_ms,
    }


def profiles(runner: ModelRunner, shape: DecoderShape, sizes: Sizes, target: Target) -> Iterator[dict[str, Any]]:
    decode = (sizes.context - 1, 1)
    few = sizes.few
    asked = {
        f"decode of {few}": [decode] * few,
        "decode of 1": [decode],
        f"decode of {sizes.most}": [decode] * sizes.most,
        f"prompt of {sizes.chunk}": [(0, sizes.chunk)],
        f"{sizes.chunk} behind {sizes.earlier}": [(sizes.earlier, sizes.chunk)],
        f"{few} decodes, {sizes.mixed_tokens[1]} prompt tokens": [decode] * few + [(0, sizes.mixed_tokens[1])],
    }
    found: dict[str, dict[str, Any]] = {}
    for name, lengths in asked.items():
        step = random_step(lengths, BLOCK_SIZE, shape.vocab)
        with target.turn():
            found[name] = profiled(runner, step, target.device, needed(shape, step))
        yield {"profiles": found}


def attentions(shape: DecoderShape, sizes: Sizes, dim: int, target: Target) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    of_layer = partial(reference.attention, shape.queries // dim, shape.keys // dim, dim, sizes.chunk)
    for earlier in (0, sizes.earlier):
        with target.turn():
            rows += of_layer(earlier, target.device)
        yield {"attention": rows}
