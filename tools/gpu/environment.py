"""Describes what the figures come from: the machine, the versions, and the ceilings of the device, which it measures:
memory bandwidth and matrix products."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tools.gpu.sections import NOT_ON_CPU, Target
from tools.gpu.timing import median_seconds

_PACKAGES = ("torch", "triton", "transformers", "tokenizers")
_ASKED = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu", "mig.mode.current")
# Rows, inner size, columns: square ones, and the projections of an 8B model for a step of 2,048 tokens.
PRODUCTS = ((8192, 8192, 8192), (2048, 4096, 14336), (2048, 14336, 4096), (4096, 4096, 4096))
MOVED_BYTES = 1 << 32  # many times the L2 cache
WARM_SECONDS = 1.0
REPEATS = 5


def run(target: Target) -> Iterator[dict[str, Any]]:
    device = target.device
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    yield {
        "device": torch.cuda.get_device_name(device) if target.is_gpu else "CPU",
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
        "cuda": torch.version.cuda or "none",
        "compiler": shutil.which("cc") or shutil.which("gcc") or "none",  # Triton needs one
    }
    if not target.is_gpu:
        yield {"ceilings": NOT_ON_CPU}
        return
    properties = torch.cuda.get_device_properties(device)
    yield {
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "nvidia_smi": nvidia_smi(),
    }
    with target.turn():
        warm_clock(device)
        moved = bandwidth(device)
        multiplied = products(device)
    yield {
        "ceilings": {
            "bytes_per_second": max(moved.values()),
            "operations_per_second": max(multiplied.values()),
            "bandwidth": moved,
            "products": multiplied,
        }
    }


def nvidia_smi() -> dict[str, str]:
    """Ask nvidia-smi about the first device. Empty where the program is missing."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return {}
    command = [tool, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    values = answer.split(", ")
    return dict(zip(_ASKED, values, strict=True)) if len(values) == len(_ASKED) else {"problem": answer[-300:]}


def warm_clock(device: torch.device) -> None:
    """Let the device compute until it runs at the clock that it has under load."""
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    until = time.monotonic() + WARM_SECONDS
    while time.monotonic() < until:
        for _ in range(10):
            torch.nn.functional.linear(x, x)
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device) -> dict[str, float]:
    """Return the bytes per second of reading, and of a copy, which reads and writes each byte."""
    source = torch.ones(MOVED_BYTES // 4, dtype=torch.float32, device=device)
    half = source[: source.numel() // 2]
    copy = torch.empty_like(half)
    calls = {"read": source.amax, "copy": partial(copy.copy_, half)}
    return {name: MOVED_BYTES / median_seconds(call, device, REPEATS) for name, call in calls.items()}


def products(device: torch.device) -> dict[str, float]:
    """Return the operations per second of bfloat16 products, by shape."""
    rates = {}
    for rows, inner, columns in PRODUCTS:
        x = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
        weight = torch.randn(columns, inner, dtype=torch.bfloat16, device=device)
        rates[f"{rows} x {inner} x {columns}"] = (
            2 * rows * inner * columns / median_seconds(partial(torch.nn.functional.linear, x, weight), device, REPEATS)
        )
    return rates
