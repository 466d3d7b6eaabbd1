"""Checks and measures the Triton kernels, where Triton is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from tools.gpu.target import NOT_ON_CPU, Target


def run(target: Target, part: str) -> Iterator[dict[str, Any]]:
    if find_spec("triton") is None:
        yield {"problem": "Triton is not installed: there are no kernels of ours."}
    elif part == "speed" and not target.is_gpu:
        yield {"problem": NOT_ON_CPU}
    else:
        from tools.gpu import kernel_check

        find = kernel_check.check if part == "correctness" else kernel_check.measure
        yield from find(target.device, quick=target.quick)
