"""Tables and numbers for a terminal. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Rows = list[list[str]]  # the first row is the header


def table(rows: Rows) -> str:
    """Return a table aligned for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def interval(entry: Mapping[str, Any], form: Callable[[float | None], str]) -> str:
    """Return the 95 % interval of a figure over the repeats, or "" for one run."""
    if entry["low"] is None:
        return ""
    return f"{form(entry['low'])} .. {form(entry['high'])}"


def times_rows(summary: Mapping[str, Any], titles: Mapping[str, str]) -> Rows:
    """Return a table of times, in milliseconds. `titles` are keyed by the metric's name in the summary; a metric
    without values has no row."""
    rows = [["ms", "mean", "p50", "p95", "p99", "max", "95 % of p50", "95 % of p99"]]
    for name, title in titles.items():
        if f"{name}_mean" in summary:
            keys = ("mean", "p50", "p95", "p99", "max")
            cells = [ms(summary[f"{name}_{key}"]["mean"]) for key in keys]
            rows.append([title, *cells, *(interval(summary[f"{name}_{key}"], ms) for key in ("p50", "p99"))])
    return rows
