"""The highest rate that a fleet bears within a SLO, under every policy: the same replicas and kinds of requests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from tools.fleet.coarse import CoarseReplica
from tools.fleet.figures import Figures
from tools.fleet.fleet import Fleet, Plan
from tools.fleet.setups import GPU, HEAD, POLICIES, SIZE, as_json, row
from tools.fleet.traffic import Mix, Traffic
from tools.markdown import as_markdown

# Requests a second for each replica: each is 5 % above the one before.
RATES = [20 * 1.05**exponent for exponent in range(48)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15, help="simulated time (default 15), a third to warm up")
    parser.add_argument("--ttft-ms", type=float, default=200, help="most of the TTFT's 99th percentile (default 200)")
    parser.add_argument("--itl-ms", type=float, default=15, help="most of the ITL's 99th percentile (default 15)")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    plan = Plan(arguments.seconds, arguments.seconds / 3)
    results: dict[str, Any] = {
        "replicas": arguments.replicas,
        "seconds": arguments.seconds,
        "ttft_ms": arguments.ttft_ms,
        "itl_ms": arguments.itl_ms,
        "policies": {},
    }
    rows = [(HEAD[0], "requests/s for each replica", "beside the first", *HEAD[1:])]
    first = None

    def is_within(figures: Figures) -> bool:
        ttft, itl = figures.ttft(99), figures.itl.percentile(0.99)
        return 1000 * ttft <= arguments.ttft_ms and 1000 * itl <= arguments.itl_ms

    for policy in POLICIES:
        rate, figures = highest(lambda rate, policy=policy: at(policy, arguments.replicas, rate, plan), is_within)
        results["policies"][policy] = {"rate": rate, **as_json(figures)}
        first = first or rate
        print(f"{policy}: {rate:.0f}/s for each replica", file=sys.stderr)
        rows.append((policy, f"{rate:.0f}", f"{rate / first:.2f}", *row(figures)[1:]))
    return results, "\n".join(as_markdown(rows))


def at(policy: str, number: int, rate: float, plan: Plan) -> Figures:
    """Simulate a fleet at a number of requests a second for each replica."""
    fleet = Fleet(policy, POLICIES[policy](number), number, CoarseReplica, SIZE, GPU)
    return fleet.run(Traffic(rate * number, Mix()), plan)


def highest(simulate: Callable[[float], Figures], is_within: Callable[[Figures], bool]) -> tuple[float, Figures]:
    """Return the highest of RATES with figures that are within the SLO, and these figures; the lowest one if none is.

    The halves are asked in turn, so it is taken for granted that a lower rate is never worse.
    """
    low, best = 0, None
    high = len(RATES)
    while high - low > 1:
        middle = (low + high) // 2
        figures = simulate(RATES[middle])
        if is_within(figures):
            low, best = middle, figures
        else:
            high = middle
    return RATES[low], best or simulate(RATES[low])
