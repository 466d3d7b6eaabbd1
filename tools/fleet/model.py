"""The model of a replica beside the real scheduler and prefix cache: the same requests, the same router."""

from __future__ import annotations

import argparse
from typing import Any

from tools.fleet.coarse import CoarseReplica, Size
from tools.fleet.fleet import Fleet, Plan
from tools.fleet.policies import Ours
from tools.fleet.replica import FullReplica
from tools.fleet.setups import GPU, HEAD, as_json, row
from tools.fleet.traffic import Mix, Traffic
from tools.markdown import as_markdown

NUM_REPLICAS = 8
CACHES = {"a cache of 400,000 tokens": 400_000, "a cache of 40,000 tokens": 40_000}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=15, help="simulated time (default 15), a third to warm up")
    parser.add_argument("--rates", type=float, nargs="+", default=[40, 80], help="requests a second for each replica")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    plan = Plan(arguments.seconds, arguments.seconds / 3)
    results: dict[str, Any] = {}
    rows = [("load", "replica", *HEAD[1:], "CPU time")]
    for cache, cache_tokens in CACHES.items():
        for rate in arguments.rates:
            load = f"{rate:g}/s, {cache}"
            results[load] = []
            for name, make in (("real", FullReplica), ("model", CoarseReplica)):
                fleet = Fleet(name, Ours(NUM_REPLICAS), NUM_REPLICAS, make, Size(cache_tokens), GPU)
                figures = fleet.run(Traffic(NUM_REPLICAS * rate, Mix()), plan)
                results[load].append(as_json(figures))
                rows.append((load, *row(figures), f"{figures.cpu_seconds:.1f} s"))
    return results, "\n".join(as_markdown(rows))
