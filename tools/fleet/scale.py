"""Simulates 1,000 replicas under several policies of routing, for docs/scale.md.

The traffic has a burst, a zone fails, and a rolling update replaces replicas.
"""

from __future__ import annotations

import argparse
import json
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tools.bench.plot import linear
from tools.fleet.fleet import Fleet, Plan
from tools.fleet.setups import GPU, HEAD, POLICIES, SIZE, as_json, milliseconds, row
from tools.fleet.traffic import Mix, Traffic
from tools.markdown import add_publishing, as_markdown, publish, results_of

REPORT_SECONDS = 2.0
NUM_PROCESSES = 2
# When what happens, as shares of the simulated time; the first third of it warms up.
BURST, ZONE, UPDATE = (0.45, 0.55), (0.6, 0.7), (0.75, 0.95)
PHASES = {"calm": (1 / 3, BURST[0]), "burst": BURST, "a zone failed": ZONE, "update": UPDATE}
BURST_SHARE, BURST_TOKENS = 0.3, 3000
NUM_ZONES = 5
UPDATED_PART = 4
# Hashing has times of seconds, which would make the others a line at the bottom.
PLOTTED = ("oaiserve", "cache-aware gateway", "least connections", "round robin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=100_000, help="requests a second, in all (default 100,000)")
    parser.add_argument("--seconds", type=float, default=15, help="simulated time (default 15)")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="results of --json with other policies")
    parser.add_argument("--plots", type=Path, help="draw the times over the simulated time into this folder")
    add_publishing(parser, "fleet-scale")
    arguments = parser.parse_args()
    results = results_of(arguments, measure)
    if arguments.plots:
        for name, drawing in plots(results).items():
            (arguments.plots / name).write_text(drawing)
    publish(arguments, "fleet-scale", results, as_text(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = {"replicas": arguments.replicas, "rate": arguments.rate, "seconds": arguments.seconds}
    found: dict[str, Any] = {}
    for path in arguments.merge:
        merged = json.loads(path.read_text())
        if (other := {name: merged[name] for name in settings}) != settings:
            sys.exit(f"{path} is of {other}, not of {settings}. Merge results of the same settings only.")
        found |= merged["policies"]
    jobs = [(policy, arguments.replicas, arguments.rate, arguments.seconds) for policy in arguments.policies]
    with get_context("spawn").Pool(NUM_PROCESSES, maxtasksperchild=1) as pool:
        for policy, result in zip(arguments.policies, pool.imap(simulate, jobs), strict=True):
            found[policy] = result
            print(f"{policy}: {result['cpu_seconds']:.0f} s of CPU time", file=sys.stderr)
    return {**settings, "policies": {policy: found[policy] for policy in POLICIES if policy in found}}


def as_text(results: dict[str, Any]) -> str:
    """Return the tables."""
    rows = [(*HEAD, "lost", "CPU time")]
    phases = [("policy", *(f"TTFT p99, {name}" for name in PHASES))]
    for policy, found in results["policies"].items():
        rows.append((*found["row"], f"{found['lost']:,}", f"{found['cpu_seconds']:.0f} s"))
        phases.append((policy, *(milliseconds(found["phases"][name]) for name in PHASES)))
    return "\n".join([*as_markdown(rows), "", *as_markdown(phases)])


def simulate(job: tuple[str, int, float, float]) -> dict[str, Any]:
    """Simulate one policy."""
    policy, number, rate, seconds = job
    traffic = Traffic(rate, Mix())
    traffic.add_burst(BURST[0] * seconds, BURST[1] * seconds, BURST_SHARE, BURST_TOKENS)
    zone = range(number - number // NUM_ZONES, number)
    plan = Plan(
        seconds,
        seconds / 3,
        REPORT_SECONDS,
        fails=(ZONE[0] * seconds, ZONE[1] * seconds, zone),
        rolls=(UPDATE[0] * seconds, UPDATE[1] * seconds, number // UPDATED_PART),
    )
    figures = Fleet(policy, POLICIES[policy](number), number, SIZE, GPU).run(traffic, plan)
    figures.always_there = slice(number // UPDATED_PART, zone.start)
    return {
        **as_json(figures),
        "row": row(figures),
        "phases": {name: figures.ttft(99, (start * seconds, end * seconds)) for name, (start, end) in PHASES.items()},
        "over_time": {f"p{percent}": figures.over_time(percent, seconds / 48) for percent in (50, 99)},
    }


def plots(results: dict[str, Any]) -> dict[str, str]:
    """Return plots of the time to the first token over the simulated time, by the name of their file."""
    return {f"fleet-ttft-{percent}.svg": _plot(results, percent) for percent in ("p50", "p99")}


def _plot(results: dict[str, Any], percent: str) -> str:
    found = results["policies"]
    series = [
        (name, [(at, 1000 * seconds) for at, seconds in found[name]["over_time"][percent]])
        for name in PLOTTED
        if name in found
    ]
    title = f"Time to first token, {percent}, of {results['replicas']:,} replicas"
    return linear(title, "seconds", f"TTFT {percent}, ms", series)
