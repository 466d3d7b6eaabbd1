"""Measures where the time of a step goes on host and device, by the engine's own records and by a profile."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.sequence import Sequence as TokenSequence
from oaiserve.engine.step import Chunk, Step
from oaiserve.facts.record import HostPart, StepKind, StepRecord
from tools.engine_load import complete, figures, greedy, percentile
from tools.gpu.workload import BLOCK_SIZE, blocks_for, started

PROFILED_STEPS = 5
MOST_KERNELS = 20


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
    periods = [(record.duration_ns + record.idle_ns) / 1e6 for record in steps]
    return {
        "sequences": batch,
        "steps": len(steps),
        "period_ms": statistics.median(periods),
        "period_p10_ms": percentile(periods, 0.1),
        "period_p90_ms": percentile(periods, 0.9),
        "device_ms": statistics.median(record.duration_ns / 1e6 for record in steps),
        "gap_ms": statistics.median(record.idle_ns / 1e6 for record in steps),
        "gap_share": sum(record.idle_ns for record in steps) / sum(r.idle_ns + r.duration_ns for r in steps),
        "host_ms": {
            part.value: statistics.median(step.host_ns.get(part, 0) for step in steps) / 1e6
            for part in HostPart
            if part != HostPart.IDLE
        },
    }


def profile_steps(
    loaded: LoadedModel, options: EngineOptions, *, sequences: int, context: int, prompt: int
) -> dict[str, Any]:
    """Profile a decode step of `sequences`, each with `context` tokens, and a step that computes a whole prompt.

    The result has the host's time to launch a step and its time until the results are there, and the kernels that take
    most of the device's time.
    """
    runner = started(loaded, options).runner
    return {
        "has_graphs": runner.has_graphs,
        "decode": _profile(runner, make_step(loaded.vocab_size, sequences, context, 1), loaded.device),
        "prefill": _profile(runner, make_step(loaded.vocab_size, 1, prompt, prompt), loaded.device),
    }


def make_step(vocab_size: int, num_sequences: int, context: int, num_tokens: int) -> Step:
    """Make a step in which sequences of `context` tokens compute their last `num_tokens`."""
    step = Step()
    blocks_each = blocks_for(1, context)
    for i in range(num_sequences):
        ids = [(i + 7 * j) % vocab_size for j in range(context)]
        sequence = TokenSequence(str(i), 0, ids, greedy(1), max_len=context + 1)
        sequence.num_computed = context - num_tokens
        sequence.blocks = list(range(i * blocks_each, i * blocks_each + -(-context // BLOCK_SIZE)))
        step.chunks.append(Chunk(sequence, context - num_tokens, num_tokens))
    return step


def _profile(runner: ModelRunner, step: Step, device: torch.device) -> dict[str, Any]:
    launched, whole = [], []
    for _ in range(12):
        began = time.perf_counter()
        handle = runner.launch(step)
        launched.append((time.perf_counter() - began) * 1e3)
        runner.collect(handle)
        whole.append((time.perf_counter() - began) * 1e3)
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED_STEPS):
            runner.collect(runner.launch(step))
        if is_gpu:
            torch.cuda.synchronize(device)
    times_us: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in profiled.key_averages():
        if (event.device_type == DeviceType.CUDA) == is_gpu:
            times_us[event.key] += event.self_device_time_total if is_gpu else event.self_cpu_time_total
            counts[event.key] += event.count
    names = sorted(times_us, key=lambda name: -times_us[name])[:MOST_KERNELS]
    return {
        "sequences": len(step.chunks),
        "tokens": step.num_tokens,
        "launch_ms": statistics.median(launched[2:]),
        "whole_ms": statistics.median(whole[2:]),
        "on": "device" if is_gpu else "host",
        "busy_ms": sum(times_us.values()) / PROFILED_STEPS / 1e3,
        "kernels": [
            {"name": name, "calls": counts[name] / PROFILED_STEPS, "us": times_us[name] / PROFILED_STEPS}
            for name in names
        ],
    }
