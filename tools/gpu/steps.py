"""Measures the steps of a model in the engine: decodes of several batch sizes, prompts in chunks, and their kernels.

Times come from the engine's own records, which use the device's clock on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from loadtest.intervals import percentile
from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.step import Step
from oaiserve.facts.record import HostPart, StepKind, StepRecord
from tests.models.decoders import real_shape
from tools.bench.floor import DecoderShape, step_work, work
from tools.engine_load import complete, figures, random_prompts, random_step
from tools.gpu.sections import Target
from tools.gpu.workload import BLOCK_SIZE, Files, blocks_for, files_of, release, running_engine, started

CONTEXT = 512
CHUNK = 2048
PROMPT = 4 * CHUNK
PROFILED_STEPS = 5
MOST_KERNELS = 20


def run(target: Target, model: str) -> Iterator[dict[str, Any]]:
    with files_of(model, target) as files:
        yield from _figures(model, files, target)


def _figures(model: str, files: Files, target: Target) -> Iterator[dict[str, Any]]:
    shape = DecoderShape.of(files.spec, real_shape(model, tiny=target.quick))
    weights = sum(part.num_bytes for part in work(shape, [(0, 0)]).values())
    yield {"model": model, "weight_bytes": weights, "kv_bytes_per_token": files.spec.kv_bytes_per_token}

    batches, context, num_tokens = ((1, 4), 40, 16) if target.quick else ((64, 1, 16, 256), CONTEXT, 128)
    prompt_len = context - num_tokens // 2  # then a sequence has `context` tokens on average over a run
    kv_blocks = blocks_for(max(batches), prompt_len + num_tokens)
    decode: list[dict[str, Any]] = []
    with running_engine(files, kv_blocks=kv_blocks, max_running=max(batches), prefix_cache=False) as engine:
        for batch in batches:
            prompts = random_prompts(batch, prompt_len, files.spec.vocab_size)
            found = measure_decodes(engine, prompts, num_tokens, repeats=1 if target.quick else 2)
            least = step_work(shape, [(context - 1, context)] * batch)
            decode.append({"context": context, "bytes": least.num_bytes, "operations": least.flops, **found})
            yield {"decode": decode}
    del engine

    yield {"prefill": prefill(files, shape, target)}
    release()

    sequences, prompt = (4, 16) if target.quick else (64, CHUNK)
    options = EngineOptions(
        compile=target.is_gpu,
        kv_blocks=blocks_for(sequences, max(context, prompt)),
        max_running=sequences,
        max_step_tokens=max(prompt, sequences),
    )
    began = time.perf_counter()
    runner = (made := started(files, options)).runner
    made.warm_up()
    yield {"start": {"seconds_to_ready": time.perf_counter() - began}}
    decode_one = [(context - 1, 1)]
    steps = {"decode": decode_one * sequences, "decode of one": decode_one, "prefill": [(0, prompt)]}
    profiles = {
        name: profiled(runner, random_step(lengths, BLOCK_SIZE, files.spec.vocab_size), target.device)
        for name, lengths in steps.items()
    }
    yield {"parts": profiles}


def measure_decodes(engine: Engine, prompts: Sequence[list[int]], num_tokens: int, repeats: int) -> dict[str, Any]:
    """Let all prompts decode together, and return figures of the steps and of the requests."""
    complete(engine, prompts, num_tokens // 4)
    engine.take_steps()  # the warm-up's
    runs = [complete(engine, prompts, num_tokens) for _ in range(repeats)]
    return step_figures(engine.take_steps(), len(prompts)) | figures(runs)


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


def prefill(files: Files, shape: DecoderShape, target: Target) -> dict[str, Any]:
    chunk, length, count = (16, 64, 2) if target.quick else (CHUNK, PROMPT, 3)
    settings: dict[str, Any] = {"max_running": 16, "max_step_tokens": chunk, "prefix_cache": False}
    settings |= {"cuda_graph": False, "explain": False}  # no step is cut by its time, so each chunk is a step
    with running_engine(files, kv_blocks=blocks_for(count, length + 1), **settings) as engine:
        complete(engine, random_prompts(1, length, files.spec.vocab_size), 1)
        engine.take_steps()
        complete(engine, random_prompts(count, length, files.spec.vocab_size, seed=1), 1)
        return prefill_figures(shape, engine.take_steps(), chunk, length)


def prefill_figures(shape: DecoderShape, records: Sequence[StepRecord], chunk: int, length: int) -> dict[str, Any]:
    """Return figures of prompts of `length` tokens that were computed one after the other, a step for each chunk."""
    steps = [record for record in records if record.kind == StepKind.PREFILL and record.num_tokens == chunk]
    each = length // chunk
    if len(steps) % each or len(steps) != len(records):
        raise RuntimeError(f"Prompts of {each} chunks did not take {each} prefill steps each: {records}")
    operations = [step_work(shape, [(start, start + chunk)]).flops for start in range(0, length, chunk)]
    medians_ns = [statistics.median(step.duration_ns for step in steps[place::each]) for place in range(each)]
    return {
        "chunk": chunk,
        "prompt": length,
        "steps": len(steps),
        "ms": [ns / 1e6 for ns in medians_ns],
        "operations": operations,
        "operations_per_second": sum(operations) / sum(medians_ns) * 1e9,
        "gap_ms": statistics.median(step.idle_ns / 1e6 for step in steps),
    }


def profiled(runner: ModelRunner, step: Step, device: torch.device) -> dict[str, Any]:
    """Return the host's time to launch a step and its time until the results are there, and the kernels that take most
    of the device's time."""
    launched = []
    whole = []
    for _ in range(12):
        began = time.perf_counter()
        handle = runner.launch(step)
        launched.append((time.perf_counter() - began) * 1e3)
        runner.collect(handle)
        whole.append((time.perf_counter() - began) * 1e3)
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED_STEPS):
            runner.collect(runner.launch(step))
        if is_gpu:
            torch.cuda.synchronize(device)
    kernels = [
        {
            "name": event.key,
            "calls": event.count / PROFILED_STEPS,
            "us": (event.self_device_time_total if is_gpu else event.self_cpu_time_total) / PROFILED_STEPS,
        }
        for event in found.key_averages()
        if (event.device_type == DeviceType.CUDA) == is_gpu
    ]
    return {
        "sequences": len(step.chunks),
        "tokens": step.num_tokens,
        "launch_ms": statistics.median(launched[2:]),
        "whole_ms": statistics.median(whole[2:]),
        "on": "device" if is_gpu else "host",
        "busy_ms": sum(kernel["us"] for kernel in kernels) / 1e3,
        "kernels": sorted(kernels, key=lambda kernel: -kernel["us"])[:MOST_KERNELS],
    }
