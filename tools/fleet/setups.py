"""All simulations have these in common: the cost of steps, the policies, and how figures are shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.fleet.coarse import Size
from tools.fleet.figures import Figures
from tools.fleet.policies import CacheAware, HashOfBeginning, LeastConnections, Ours, Policy, RoundRobin
from tools.simulate import Costs

# About a model of one billion parameters on an H200, on paper: 1.2 ms to read the weights, 2.4 GFLOP for a token at 480
# TFLOP/s, and 32 KiB of keys and values for a token of context at 3.3 TB/s.
GPU = Costs(step=0.0012, token=5e-6, context=1e-5)
SIZE = Size(cache_tokens=400_000)  # of a replica of the larger fleets

POLICIES: dict[str, Callable[[int], Policy]] = {
    "round robin": RoundRobin,
    "least connections": LeastConnections,
    "hash of the beginning": HashOfBeginning,
    "cache-aware gateway": CacheAware,
    "oaiserve": Ours,
    "oaiserve, 8 routers": lambda number: Ours(number, 8),
}
HEAD = (
    "policy",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "hits",
    "busiest / mean",
    "work, s per M tokens",
)


def row(figures: Figures) -> tuple[str, ...]:
    return (
        figures.policy,
        *(milliseconds(seconds) for seconds in (figures.ttft(50), figures.ttft(99))),
        *(milliseconds(figures.itl.percentile(share)) for share in (0.5, 0.99)),
        f"{100 * figures.hit_rate:.1f} %",
        f"{figures.imbalance:.2f}",
        f"{figures.work:.2f}",
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{1000 * seconds:,.{0 if seconds >= 0.1 else 1}f} ms"


def as_json(figures: Figures) -> dict[str, Any]:
    return {
        "policy": figures.policy,
        "requests": len(figures.ttfts),
        "ttft_seconds": {f"p{percent}": figures.ttft(percent) for percent in (50, 90, 99)},
        "itl_seconds": {f"p{percent}": figures.itl.percentile(percent / 100) for percent in (50, 90, 99)},
        "hit_rate": figures.hit_rate,
        "imbalance": figures.imbalance,
        "work_seconds_per_million_tokens": figures.work,
        "lost": figures.num_lost,
        "without_first_token": figures.num_unfinished,
        "cpu_seconds": figures.cpu_seconds,
    }
