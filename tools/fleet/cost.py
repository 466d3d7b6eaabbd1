"""What a policy costs: the highest rate at which a fleet keeps a goal, and the replica seconds for a million tokens."""

from __future__ import annotations

import argparse
from typing import Any

from tools.fleet.coarse import CoarseReplica, Size
from tools.fleet.figures import Figures
from tools.fleet.fleet import Fleet, Plan
from tools.fleet.setups import GPU, POLICIES, as_json, milliseconds
from tools.fleet.traffic import Mix, Traffic
from tools.markdown import as_markdown

NUM_REPLICAS = 16
MOST_TTFT_SECONDS, MOST_ITL_SECONDS = 0.5, 0.05  # at the 99th percentile
LOWEST_RATE, STEP = 32.0, 1.15  # requests a second for each replica, and from one rate to the next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=12, help="simulated time (default 12), a third to warm up")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    plan = Plan(arguments.seconds, arguments.seconds / 3)
    results: dict[str, Any] = {}
    rows = [("policy", "requests/s for each replica", "replica seconds per M tokens", "TTFT p99", "ITL p99", "hits")]
    for policy in POLICIES:
        rate, figures = highest(policy, plan)
        seconds = NUM_REPLICAS * figures.seconds / (figures.prompt_tokens + figures.answer_tokens) * 1e6
        results[policy] = {"rate": rate, "replica_seconds_per_million_tokens": seconds, **as_json(figures)}
        times = (milliseconds(figures.ttft(99)), milliseconds(figures.itl.percentile(0.99)))
        rows.append((policy, f"{rate:.0f}", f"{seconds:.2f}", *times, f"{100 * figures.hit_rate:.1f} %"))
    return results, "\n".join(as_markdown(rows))


def highest(policy: str, plan: Plan) -> tuple[float, Figures]:
    """Return the highest rate for each replica that keeps the goal, and its figures."""
    rate, kept = LOWEST_RATE, None
    while True:
        fleet = Fleet(policy, POLICIES[policy](NUM_REPLICAS), NUM_REPLICAS, CoarseReplica, Size(400_000), GPU)
        figures = fleet.run(Traffic(NUM_REPLICAS * rate, Mix()), plan)
        if figures.ttft(99) > MOST_TTFT_SECONDS or figures.itl.percentile(0.99) > MOST_ITL_SECONDS:
            if kept is None:
                raise ValueError(f"{policy} does not keep the goal at {rate} requests a second for each replica")
            return rate / STEP, kept
        kept = figures
        rate *= STEP
