"""Compares two reports of the load test: B's figures as ratios to A's, with intervals where both were repeated.

`oaiserve bench compare` prints the comparison.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.intervals import ratio_interval
from loadtest.tables import ms, number, table
from oaiserve.errors import StartupError

Report = dict[str, Any]  # or a part of one

SCHEMA = "oaiserve-loadtest/1"
CHANCE = {"load_average", "seed"}  # values that differ between any two runs
SHOWN = (
    *("requests_per_second", "completion_tokens_per_second", "steady_completion_tokens_per_second"),
    *("total_tokens_per_second", "goodput_per_second"),
    *("submit_wall", "submit_p50", "submit_p99"),
    *("phase_tokenize_p50", "phase_queue_p50", "phase_prefill_p50"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p99", "latency_p50", "latency_p99"),
)  # fmt: skip


def load_report(path: Path) -> Report:
    """Load a report from a JSON file. Raises StartupError for a file that is not a report of this version."""
    try:
        report = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"'{path}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise StartupError(f"'{path}' is not JSON.") from error
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != SCHEMA:
        raise StartupError(f"'{path}' has the schema {schema!r}, but must have {SCHEMA!r}: write it with --json.")
    return report  # type: ignore[no-any-return]


def compare(a: Report, b: Report) -> str:
    """Return the comparison as text: the settings that differ, and a table for each pair of points."""
    lines = [*_differences(a, b)]
    for point_a, point_b in zip(a["points"], b["points"], strict=False):
        old = point_a["summary"]
        new = point_b["summary"]
        lines.append(f"\n== A: {point_a['label']} ({point_a['verdict']}), B: {point_b['label']} ({point_b['verdict']})")
        rows = [_row(name, old[name], new[name]) for name in SHOWN if name in old and name in new]
        lines.append(table([["", "A", "B", "B / A", "95 %"], *rows]))
    return "\n".join(lines).lstrip("\n") + "\n"


def _row(name: str, a: Report, b: Report) -> list[str]:
    form = number if name.endswith("second") else ms
    title = name.replace("_", " ") + ("" if form is number else ", ms")
    interval = ratio_interval(a["values"], b["values"])
    ratio = f"{b['mean'] / a['mean']:.3f}" if a["mean"] else "-"
    between = f"{interval[0]:.3f} .. {interval[1]:.3f}" if interval else ""
    sure = " *" if interval and not interval[0] <= 1 <= interval[1] else ""
    return [title, form(a["mean"]), form(b["mean"]), ratio, between + sure]


def _differences(a: Report, b: Report) -> Iterator[str]:
    if len(a["points"]) != len(b["points"]):
        yield f"DIFFERENT: A has {len(a['points'])} points, B has {len(b['points'])}."
    targets = [report.get("target", "http") for report in (a, b)]  # older reports have none
    if targets[0] != targets[1]:
        yield f"DIFFERENT: target is {targets[0]} in A, {targets[1]} in B"
    for part in ("workload", "engine", "slos", "environment"):
        old = a.get(part)
        new = b.get(part)
        if isinstance(old, dict) and isinstance(new, dict):
            for key in sorted(key for key in (old.keys() | new.keys()) - CHANCE if old.get(key) != new.get(key)):
                yield f"different: {part} {key} is {old.get(key)} in A, {new.get(key)} in B"
        elif old != new and part != "engine":
            yield f"DIFFERENT: {part} is {old} in A, {new} in B"
    if any(len(report["points"][0]["runs"]) < 2 for report in (a, b) if report["points"]):
        yield "Without repeats on both sides there are no intervals, so a ratio may be due to chance."
