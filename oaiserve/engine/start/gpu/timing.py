"""Measures how long the device takes, to choose the faster of two ways to compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

REPEATS = 5

Seconds = Callable[[Callable[[], object]], float]


def device_seconds(call: Callable[[], object]) -> float:
    """Return the least time of a call on the GPU. The first call compiles, and doesn't count."""
    call()
    best_ms = math.inf
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return best_ms / 1e3
