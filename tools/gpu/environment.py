"""Describes what the figures come from: the machine, the versions, and the ceilings of the device."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from tools.gpu import ceilings
from tools.gpu.target import NOT_ON_CPU, Target

_PACKAGES = ("torch", "triton", "transformers", "tokenizers")
_ASKED = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "utilization.gpu",
    "memory.used",
    "mig.mode.current",
)


def run(target: Target) -> Iterator[dict[str, Any]]:
    yield {
        "device": torch.cuda.get_device_name(target.device) if target.is_gpu else "CPU",
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "cuda": torch.version.cuda or "none",
        "compiler": shutil.which("cc") or shutil.which("gcc") or "none",  # Triton and Inductor need one
    }
    if not target.is_gpu:
        yield {"ceilings": NOT_ON_CPU}
        return
    properties = torch.cuda.get_device_properties(target.device)
    yield {
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "nvidia_smi": nvidia_smi(),
    }
    moved, multiplied = ceilings.bandwidth(target.device), ceilings.products(target.device)
    yield {
        "ceilings": {
            "bytes_per_second": max(moved.values()),
            "operations_per_second": max(multiplied.values()),
            "bandwidth": moved,
            "products": multiplied,
            "launch": ceilings.launches(target.device),
            "pinned_copy": ceilings.copies(target.device),
        }
    }
    yield {"nvidia_smi_after": nvidia_smi()}


def nvidia_smi() -> dict[str, str]:
    """Ask nvidia-smi about the first device. Empty where the program is missing."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return {}
    command = [tool, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return {"problem": "nvidia-smi did not answer"}
    values = answer.stdout.strip().split(", ")
    return dict(zip(_ASKED, values, strict=True)) if len(values) == len(_ASKED) else {"problem": answer.stdout[-300:]}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
