"""What a streamed event costs through Ray with HAProxy and the router, and how much later it comes, beside plain."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tools.cluster.local import LocalCluster, start_local
from tools.front_ends import Stream, cpu_ns, quantile, read_streams, serving
from tools.markdown import as_markdown

Cpu = Callable[[], dict[str, int]]  # nanoseconds so far, by kind of process


@dataclass(frozen=True)
class Costs:
    way: str
    us_per_event: dict[str, float]  # CPU time, by kind of process
    tokens_per_second: float
    first_ms: tuple[float, float]  # p50 and p99
    gap_ms: tuple[float, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--singles", type=int, default=100, help="requests one after the other, for the first token")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    found = []
    for way in (plain, through_ray):
        with way() as (url, cpu):
            found.append(measure(way.__name__.replace("_", " "), url, cpu, arguments))
            print(found[-1], flush=True)
    return {"costs": [asdict(one) for one in found]}, table(found)


@contextmanager
def plain() -> Iterator[tuple[str, Cpu]]:
    with serving(0, step_ms=2) as server:
        yield server.url, lambda: {"replica": cpu_ns(server.process.pid)}


@contextmanager
def through_ray() -> Iterator[tuple[str, Cpu]]:
    with start_local(num_cpus=2, nodes=0) as cluster:
        cluster.deploy(1, step_ms=2, max_running=1024, max_step_tokens=8192, max_waiting=2048)
        cluster.wait_until(lambda: bool(cluster.replicas()) and cluster.answers(), "the start")
        yield f"http://127.0.0.1:{cluster.port}", lambda: by_kind(cluster)


def by_kind(cluster: LocalCluster) -> dict[str, int]:
    """Return the CPU time of the front, of the router and of the replicas; the control plane is left out."""
    return {
        "front": sum(map(cpu_ns, cluster.fronts())),
        "router": sum(map(cpu_ns, cluster.processes("ray::ServeReplica:oaiserve:router"))),
        "replica": sum(map(cpu_ns, cluster.processes("ray::ServeReplica:oaiserve:replica"))),
    }


def measure(way: str, url: str, cpu: Cpu, arguments: argparse.Namespace) -> Costs:
    asyncio.run(read_streams(url, arguments.streams, 50))  # warms up
    spent: dict[str, list[float]] = {}
    rates = []
    total = arguments.streams * arguments.tokens
    for _ in range(arguments.rounds):
        before, began = cpu(), time.monotonic()
        asyncio.run(read_streams(url, arguments.streams, arguments.tokens))
        took, after = time.monotonic() - began, cpu()
        rates.append(total / took)
        for kind in after:
            spent.setdefault(kind, []).append((after[kind] - before.get(kind, 0)) / total / 1e3)
    first = []
    for _ in range(arguments.singles):
        (stream,) = asyncio.run(read_streams(url, 1, 2))
        first.append(first_ms(stream))
    streams = asyncio.run(read_streams(url, 4, arguments.tokens))
    gaps = [
        (later - earlier) / 1e6
        for stream in streams
        for earlier, later in zip(stream.read_ns, stream.read_ns[1:], strict=False)
    ]
    return Costs(
        way,
        {kind: statistics.median(values) for kind, values in spent.items()},
        statistics.median(rates),
        (statistics.median(first), quantile(first, 0.99)),
        (statistics.median(gaps), quantile(gaps, 0.99)),
    )


def first_ms(stream: Stream) -> float:
    return (stream.read_ns[0] - stream.begun_ns) / 1e6


def table(found: list[Costs]) -> str:
    head = ["way", "replica, µs/event", "front", "router", "in all", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99"]
    rows = [head]
    for one in found:
        parts = [f"{one.us_per_event[kind]:.1f}" if kind in one.us_per_event else "" for kind in ("replica", "front")]
        parts.append(f"{one.us_per_event['router']:.1f}" if "router" in one.us_per_event else "")
        times = [f"{value:.2f} ms" for value in (*one.first_ms, *one.gap_ms)]
        rows.append([one.way, *parts, f"{sum(one.us_per_event.values()):.1f}", f"{one.tokens_per_second:,.0f}", *times])
    return "\n".join(as_markdown(rows))
