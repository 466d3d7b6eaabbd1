"""Compares two reports of the load test: B's figures as ratios to A's, with intervals where both were repeated.

`oaiserve bench compare` prints the comparison, and so does `oaiserve diff` of two reports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from oaiserve.errors import StartupError
from oaiserve.explain.intervals import ratio_interval

Report = dict[str, Any]  # or a part of one

SCHEMA = "oaiserve-loadtest/1"
SHOWN = (
    *("requests_per_second", "completion_tokens_per_second", "steady_completion_tokens_per_second"),
    *("total_tokens_per_second", "goodput_per_second"),
    *("submit_p50", "submit_p99", "phase_tokenize_p50", "phase_queue_p50", "phase_prefill_p50"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p99", "latency_p50", "latency_p99"),
)  # fmt: skip
MOST_NAMED = 6  # figures of a point in the paragraph
LEAST_CHANGE = 0.02  # for a figure to be in the paragraph, if it is not due to chance


def is_report(path: Path) -> bool:
    """Return whether a file looks like a report; an unreadable one does not."""
    try:
        with path.open("rb") as file:
            return b'"schema"' in file.read(100)
    except OSError:
        return False


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


def compare(a: Report, b: Report, *, with_tables: bool = True) -> str:
    """Return the comparison as text: a paragraph, the settings that differ, and a table for each pair of points."""
    lines = [paragraph(a, b)]
    if not with_tables:
        return lines[0] + "\n"
    lines += ["", *_differences(a, b)]
    for point_a, point_b, figures in _pairs(a, b):
        lines.append(f"\n== A: {point_a['label']} ({point_a['verdict']}), B: {point_b['label']} ({point_b['verdict']})")
        lines.append(table(("", "A", "B", "B / A", "95 %"), [_row(*figure) for figure in figures]))
    return "\n".join(lines).lstrip("\n") + "\n"


def _pairs(a: Report, b: Report) -> Iterator[tuple[Report, Report, list[tuple[str, Report, Report]]]]:
    """Yield each pair of points, and the figures that both have: name, A's and B's."""
    for point_a, point_b in zip(a["points"], b["points"], strict=False):
        old, new = point_a["summary"], point_b["summary"]
        yield point_a, point_b, [(name, old[name], new[name]) for name in SHOWN if name in old and name in new]


def paragraph(a: Report, b: Report) -> str:
    """Return the figures with the largest changes for each pair of points, the largest first.

    Those of runs without repetition are named all the same, with a word about chance.
    """
    sentences, is_repeated = [], True
    for point_a, point_b, figures in _pairs(a, b):
        changed = []
        for name, old, new in figures:
            interval = ratio_interval(old["values"], new["values"])
            is_repeated = is_repeated and interval is not None
            if not old["mean"] or not new["mean"] or (interval and interval[0] <= 1 <= interval[1]):
                continue
            change = math.log(new["mean"] / old["mean"])
            if abs(change) >= LEAST_CHANGE:
                between = f", {interval[0]:.2f} .. {interval[1]:.2f}" if interval else ""
                form, unit = (number, "") if name.endswith("second") else (ms, " ms")
                title = name.replace("_", " ").replace(" per second", "/s")
                values = f"{form(old['mean'])}{unit} to {form(new['mean'])}{unit}"
                changed.append((abs(change), f"{title} {values} ({new['mean'] / old['mean']:.2f}{between})"))
        changed.sort(key=lambda one: -one[0])
        named = "; ".join(text for _, text in changed[:MOST_NAMED]) or "no figure changed for certain"
        label = (
            point_b["label"] if point_a["label"] == point_b["label"] else f"{point_a['label']} -> {point_b['label']}"
        )
        sentences.append(f"{label}: {named}.")
    if not is_repeated:
        sentences.append("Without --repeats on both sides, a change may be chance.")
    return " ".join(sentences)


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
    for part in ("target", "workload", "engine", "slos", "environment"):
        old, new = a.get(part), b.get(part)
        if isinstance(old, dict) and isinstance(new, dict):
            skipped = {"load_average"}
            changed = [k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and k not in skipped]
            for key in sorted(changed):
                yield f"different: {part} {key} is {old.get(key)} in A, {new.get(key)} in B"
        elif old != new:
            yield f"DIFFERENT: {part} is {old} in A, {new} in B"
    if any(len(report["points"][0]["runs"]) < 2 for report in (a, b) if report["points"]):
        yield "Without repeats on both sides there are no intervals, so a ratio may be due to chance."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table aligned for a terminal: the first column to the left, the others to the right."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
