"""Measures in some seconds what this machine can do at most: read memory, and multiply matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = 2**30  # far more than any cache holds
# Rows, inner size and columns. One matrix stays in the caches, which suits torch's library best.
GEMMS = ((256, 576, 1536), (2048, 576, 1536), (1024, 1024, 1024))


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_per_second: float
    flops_per_second: float


@torch.inference_mode()
def measure(dtype: torch.dtype, num_threads: int, seconds: float = 1.0) -> Ceilings:
    """Measure with so many threads for about four times `seconds`. Leaves torch with one thread."""
    torch.set_num_threads(num_threads)
    memory = torch.ones(READ_BYTES // 4)
    bytes_per_second = READ_BYTES / _best_seconds(lambda: memory.amax(), seconds)
    flops_per_second = 0.0
    for rows, inner, columns in GEMMS:
        x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        took = _best_seconds(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight), seconds)  # type: ignore[misc]
        flops_per_second = max(flops_per_second, 2 * rows * inner * columns / took)
    torch.set_num_threads(1)
    return Ceilings(bytes_per_second, flops_per_second)


def _best_seconds(call: Callable[[], object], seconds: float) -> float:
    call()
    best, give_up = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < give_up:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best
