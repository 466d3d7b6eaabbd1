"""Times calls by the device's own clock, launched one by one or replayed as a CUDA graph.

Elsewhere than on a GPU, for a dry run, the clock is the host's, and a graph is the call itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from oaiserve.plugins.cuda.executor.cuda_capture import CudaCapture

Call = Callable[[], object]
REPEATS = 10


def median_seconds(call: Call, device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median time of a call. Two earlier ones compile and choose kernels, and don't count."""
    call()
    call()
    return statistics.median(_seconds(call, device) for _ in range(repeats))


def _seconds(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def graph_of(call: Call, device: torch.device) -> Call:
    """Return a call that replays the work of another one."""
    return CudaCapture(device)(call) if device.type == "cuda" else call
