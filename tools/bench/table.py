"""Makes tables in markdown from measured rounds. Pure.

A server has a list of rounds, one for each repeat. A round has figures of the server (start_seconds, peak_rss_mib) and
a dictionary of figures for each workload that it finished.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench.servers import OURS
from tools.bench.workloads import MEASURES, Measure
from tools.markdown import as_markdown, number

Rounds = list[dict[str, Any]]


def values(rounds: Rounds, measure: Measure) -> dict[int, float]:
    """Return the measure by number of the round, for the rounds that have it."""
    by_round: dict[int, float] = {}
    for round_number, figures in enumerate(rounds):
        if measure.workload is not None:
            figures = figures.get("workloads", {}).get(measure.workload, {})
        if (value := figures.get(measure.key)) is not None:
            by_round[round_number] = value
    return by_round


def spread(found: Sequence[float]) -> str:
    """Return median (least..most), or a single value as it is."""
    if not found:
        return ""
    median = number(statistics.median(found))
    return median if len(found) == 1 else f"{median} ({number(min(found))}..{number(max(found))})"


def comparison(servers: dict[str, Any]) -> list[str]:
    """Return a row for each measure: every server's median and spread, and the ratio to the peer with the best median.

    Ratios are of rounds that both have: a disturbance in a round is likely to hit both.
    """
    rows = [["", "measure", *servers, "best peer", "ratio", "goal"]]
    for measure in MEASURES:
        by_server = {name: values(server["rounds"], measure) for name, server in servers.items()}
        if not any(by_server.values()):
            continue
        cells = [spread([*by_round.values()]) for by_round in by_server.values()]
        medians = {name: statistics.median(one.values()) for name, one in by_server.items() if one and name != OURS}
        best = ""
        ratio = ""
        if medians:
            best = (max if measure.more_is_better else min)(medians, key=lambda name: medians[name])
            ratios = [
                by_server[OURS][place] / value
                for place, value in by_server[best].items()
                if value and place in by_server[OURS]
            ]
            ratio = f"**{spread(ratios)}**" if ratios else ""
        sign = "≥" if measure.more_is_better else "≤"
        goal = "" if measure.goal is None else f"{sign} {measure.goal:g} times"
        if measure.limit is not None:
            goal = f"{sign} {number(measure.limit)} {measure.unit}"
        rows.append([measure.workload or "", f"{measure.title}, {measure.unit}", *cells, best, ratio, goal])
    return as_markdown(rows)


def report(results: dict[str, Any]) -> str:
    """Return the whole text, to stand between the markers of the page."""
    servers: dict[str, Any] = results["servers"]
    runs = [run for s in servers.values() for r in s["rounds"] for run in r.get("workloads", {}).values()]
    others = max((run["other_cores"] for run in runs), default=0.0)
    form = ", in the short form" if results["is_short"] else ""
    num_rounds = max(len(server["rounds"]) for server in servers.values())
    lines = [
        f"{results['machine']}; {results['created']}. Client: {results['client']}.",
        f"Median (least..most) of {num_rounds} rounds{form}.",
        f"Other processes of the machine used {others:.2f} cores at most, on average over a run.",
        "",
        *comparison(servers),
        "",
        *(f"- {name} {server['version']}: `{server['command']}`" for name, server in servers.items()),
        *(
            f"- {name}, {what}: {problem}"
            for name, server in servers.items()
            for what, problem in server["problems"].items()
        ),
    ]
    return "\n".join(lines)
