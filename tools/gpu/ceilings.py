"""Measures the ceilings of the device: memory bandwidth, matrix products, kernel launches, copies from the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# Rows, inner size, columns: square ones, and the projections of an 8B model for a step of 2,048 tokens.
PRODUCTS = ((8192, 8192, 8192), (2048, 4096, 14336), (2048, 14336, 4096), (4096, 4096, 4096))
MOVED_BYTES = 1 << 32  # many times the L2 cache
SMALL_BYTES = 4096


def seconds(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Return the time of one call: the median over several runs of all calls. On a GPU they run as a CUDA graph, which
    leaves out the host's time."""
    if device.type == "cpu":
        started = time.perf_counter()
        calls[0]()
        return time.perf_counter() - started
    for call in calls[:2]:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def bandwidth(device: torch.device, num_bytes: int = MOVED_BYTES) -> dict[str, float]:
    """Return the bytes per second of reading, and of a copy, which reads and writes each byte."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    read = seconds([lambda: source.amax()] * 4, device)
    half = source[: source.numel() // 2]
    target = torch.empty_like(half)
    copied = seconds([lambda: target.copy_(half)] * 4, device)
    return {"read": num_bytes / read, "copy": num_bytes / copied}


def products(device: torch.device, shapes: tuple[tuple[int, int, int], ...] = PRODUCTS) -> dict[str, float]:
    """Return the operations per second of bfloat16 products, by shape."""
    rates = {}
    for rows, inner, columns in shapes:
        x = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
        weight = torch.randn(columns, inner, dtype=torch.bfloat16, device=device)
        taken = seconds([lambda x=x, weight=weight: torch.nn.functional.linear(x, weight)] * 8, device)  # type: ignore[misc]
        rates[f"{rows} x {inner} x {columns}"] = 2 * rows * inner * columns / taken
    return rates


def launches(device: torch.device) -> dict[str, float]:
    """Return the microseconds of a tiny kernel: of the host to launch it, and of the device to run it in a graph."""
    x = torch.zeros(1, device=device)
    host = []
    for _ in range(7):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(200):
            x.add_(1)
        host.append((time.perf_counter() - started) / 200)
    return {
        "host_us": statistics.median(host[2:]) * 1e6,
        "in_graph_us": seconds([lambda: x.add_(1)] * 200, device) * 1e6,
    }


def copies(device: torch.device) -> dict[str, float]:
    """Return the microseconds until a few bytes of pinned memory are on the device, and until they are back."""
    on_host = torch.zeros(SMALL_BYTES, dtype=torch.uint8).pin_memory()
    on_device = on_host.to(device)
    return {
        "to_device_us": _waited_us(lambda: on_device.copy_(on_host, non_blocking=True)),
        "to_host_us": _waited_us(lambda: on_host.copy_(on_device, non_blocking=True)),
    }


def _waited_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[5:]) * 1e6
