"""Checks the Triton kernels, where Triton is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from tools.gpu.target import Target


def run(target: Target) -> Iterator[dict[str, Any]]:
    if find_spec("triton") is None:
        yield {"problem": "Triton is not installed: there are no kernels of ours."}
    else:
        from tools.gpu import kernel_check

        yield from kernel_check.check(target.device, quick=target.quick)
