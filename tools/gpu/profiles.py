"""Profiles a step, and sorts its kernels into the parts of a decoder, each with the bytes and operations that it needs.

The parts follow from the order of the kernels: those of libraries, whose names say little, are between our own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.sequences.step import Step
from tools.bench.floor import DecoderShape, Work, work

STEPS = 5
WARM_STEPS = 3
MOST_KERNELS = 12

# Our kernels, and the part that each is of.
_OWN = {
    "plan_kernel": "plan",
    "write_kernel": "write",
    "decode_kernel": "attention",
    "prefill_kernel": "attention",
    "add_and_norm_kernel": "norm",
    "activate_kernel": "activation",
    "best_of_chunk_kernel": "draw",
    "best_kernel": "draw",
    "weights_kernel": "draw",
    "candidates_kernel": "draw",
    "cut_kernel": "draw",
    "scores_kernel": "draw",
}
# The product between a part and the next one.
_BETWEEN = {
    ("norm", "write"): "qkv",
    ("norm", "attention"): "qkv",
    ("attention", "norm"): "output",
    ("norm", "activation"): "gate and up",
    ("activation", "norm"): "down",
    ("norm", "draw"): "logits",
    ("norm", ""): "logits",
}
_COPIES = ("Memcpy", "Memset")


class Kernel(NamedTuple):
    name: str
    us: float


def parts_of(kernels: Iterable[Kernel]) -> list[tuple[str, Kernel]]:
    """Return the kernels of steps in order, each with its part."""
    found: list[tuple[str, Kernel]] = []
    pending: list[Kernel] = []
    last = ""

    def settle(part: str) -> None:
        between = _BETWEEN.get((last, part), "others")
        found.extend((between, one) for one in pending)
        pending.clear()

    for kernel in kernels:
        own = _OWN.get(kernel.name)
        if kernel.name.startswith(_COPIES):
            found.append(("copies", kernel))
        elif own is None:
            pending.append(kernel)
        else:
            settle(own)
            found.append((own, kernel))
            last = own
    settle("")
    return found


def needed(shape: DecoderShape, step: Step) -> dict[str, Work]:
    """Return the least work of the parts of a step, those that only move hidden states included."""
    chunks = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in step.chunks]
    tokens = sum(end - start for start, end in chunks)
    of_hidden = tokens * shape.hidden * shape.element_bytes
    of_inner = tokens * shape.intermediate * shape.element_bytes
    parts = {name: part for name, part in work(shape, chunks).items() if name not in ("embed", "norm", "rotary")}
    is_decode = all(end - start == 1 for start, end in chunks)
    return parts | {
        "norm": Work((2 * shape.layers + 1) * 4.0 * of_hidden, 0),  # reads two and writes two
        "activation": Work(shape.layers * 3.0 * of_inner, 0),
        # The kernel of decodes writes, too.
        "write": Work(0 if is_decode else 2.0 * tokens * shape.cached_bytes, 0),
    }


def profiled(runner: ModelRunner, step: Step, device: torch.device, least: Mapping[str, Work]) -> dict[str, Any]:
    """Return the time of each part of a step on the device beside what it needs, the time of the whole step, and the
    kernels that take longest."""
    device_ns = [runner.collect(runner.launch(step)).device_ns for _ in range(WARM_STEPS)]
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            runner.collect(runner.launch(step))
        if is_gpu:
            torch.cuda.synchronize(device)
    events = [event for event in found.events() or () if (event.device_type == DeviceType.CUDA) == is_gpu]
    events.sort(key=lambda event: event.time_range.start)
    kernels = [
        Kernel(event.name, event.time_range.elapsed_us() if is_gpu else event.self_cpu_time_total) for event in events
    ]
    parts: dict[str, list[Kernel]] = {}
    for part, kernel in parts_of(kernels):
        parts.setdefault(part, []).append(kernel)
    rows = [_row(part, of_part, least.get(part, Work(0, 0))) for part, of_part in parts.items()]
    busy_us = sum(kernel.us for kernel in kernels) / STEPS
    by_device = [ns / 1e3 for ns in device_ns if ns is not None]
    whole_us = statistics.median(by_device) if by_device else busy_us
    return {
        "sequences": len(step.chunks),
        "tokens": step.num_tokens,
        "device_us": whole_us,
        "busy_us": busy_us,
        "parts": sorted(rows, key=lambda row: -row["us"]),
        "kernels": _longest(kernels),
    }


def _row(part: str, kernels: Sequence[Kernel], least: Work) -> dict[str, Any]:
    longest = max(kernels, key=lambda kernel: kernel.us)
    return {
        "part": part,
        "us": sum(kernel.us for kernel in kernels) / STEPS,
        "calls": len(kernels) / STEPS,
        "bytes": least.num_bytes,
        "operations": least.flops,
        "kernel": longest.name[:60],
    }


def _longest(kernels: Iterable[Kernel]) -> list[dict[str, Any]]:
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.us)
    rows = [{"name": name[:100], "calls": len(us) / STEPS, "us": sum(us) / STEPS} for name, us in by_name.items()]
    return sorted(rows, key=lambda row: -row["us"])[:MOST_KERNELS]
