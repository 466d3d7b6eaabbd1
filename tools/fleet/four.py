"""Four replicas under every policy, beside one with four times the cache: with the real scheduler and prefix cache."""

from __future__ import annotations

import argparse
from typing import Any

from tools.fleet.coarse import Size
from tools.fleet.figures import Figures
from tools.fleet.fleet import Fleet, Plan
from tools.fleet.policies import RoundRobin
from tools.fleet.replica import FullReplica
from tools.fleet.setups import GPU, HEAD, MIXES, POLICIES, as_json, row
from tools.fleet.traffic import Traffic
from tools.markdown import as_markdown
from tools.simulate import Costs

# Of each trace: requests a second, in all, and the tokens that a replica's cache has room for.
LOADS = {"talks": (600, 200_000), "agents": (300, 200_000), "documents": (40, 400_000)}
# Traces of few requests last so many times as long: of 500, where they go by chance changes the hits by some points.
LENGTHS = {"talks": 1, "agents": 1, "documents": 6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=30,
        help="simulated time (default 30), a third to warm up; documents last 6 times as long",
    )


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    results: dict[str, Any] = {}
    rows = [("requests", *HEAD, "hits of one")]
    for name, mix in MIXES.items():
        seconds = LENGTHS[name] * arguments.seconds
        plan = Plan(seconds, seconds / 3)
        of_one = one(name, plan)
        results[name] = [as_json(of_one)]
        rows.append((name, *row(of_one), ""))
        for policy, make in POLICIES.items():
            rate, cache_tokens = LOADS[name]
            fleet = Fleet(policy, make(4), 4, FullReplica, Size(cache_tokens), GPU)
            figures = fleet.run(Traffic(rate, mix), plan)
            results[name].append(as_json(figures))
            rows.append((name, *row(figures), f"{100 * figures.hit_rate / of_one.hit_rate:.1f} %"))
    return results, "\n".join(as_markdown(rows))


def one(name: str, plan: Plan) -> Figures:
    """Return the figures of one replica that is four times as large and four times as fast."""
    rate, cache_tokens = LOADS[name]
    replica = Size(cache_tokens)
    size = Size(4 * cache_tokens, 4 * replica.max_running, 4 * replica.max_step_tokens)
    costs = Costs(GPU.step / 4, GPU.token / 4, GPU.context / 4)
    fleet = Fleet("one, of four times the size", RoundRobin(1), 1, FullReplica, size, costs)
    return fleet.run(Traffic(rate, MIXES[name]), plan)
