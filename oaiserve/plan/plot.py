"""Draws a plan as an SVG: times by rate, with the limits. It follows the reader's light or dark system."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 720, 270
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 60, 12, 44, 44, 70
LEAST_DISTANCE = 40  # between the rates that are marked
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1a202b; }
.quiet { fill: #515b6b; font-size: 12px; }
.axis { stroke: #8b95a5; fill: none; }
.p50 { stroke: #8b95a5; fill: none; stroke-width: 2; }
.p99 { stroke: #2563eb; fill: none; stroke-width: 2; }
.limit { stroke: #c2410c; fill: none; stroke-dasharray: 5 4; stroke-width: 1.5; }
.best { stroke: #8b95a5; fill: none; stroke-dasharray: 2 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e7ebf1; }
  .quiet { fill: #a5b0c0; }
  .p99 { stroke: #6ea8fe; }
  .limit { stroke: #fb923c; }
}
"""


def draw(outcome: Mapping[str, Any]) -> str:
    """Draw the TTFT and ITL of a plan with a highest rate (see `command.make_plan`) as an SVG."""
    width = (WIDTH - LEFT - RIGHT - BETWEEN) / 2
    panels = (("TTFT", "ttft"), ("ITL", "itl"))
    parts = []
    for index, (title, metric) in enumerate(panels):
        parts += _panel(title, metric, outcome, LEFT + index * (width + BETWEEN), width)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>TTFT and ITL by rate</title>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(title: str, metric: str, outcome: Mapping[str, Any], left: float, width: float) -> list[str]:
    rates = [row for row in outcome["rates"] if row[f"{metric}_seconds"] is not None]
    limit = outcome["slos_seconds"].get(metric)
    lines = {name: [(row["rate"], 1e3 * row[f"{metric}_seconds"][name]) for row in rates] for name in ("p50", "p99")}
    highest = max(row["rate"] for row in outcome["rates"])
    most = max([y for line in lines.values() for _, y in line] + ([] if limit is None else [1.1e3 * limit]), default=1)
    step = _round_step(most)
    bottom = HEIGHT - BOTTOM

    def place(rate: float, ms: float) -> str:
        return f"{left + rate / highest * width:.1f} {bottom - ms / most * (bottom - TOP):.1f}"

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        return f'<path d="M{" L".join(place(*point) for point in points)}" class="{style}"/>'

    parts = [_text(left, 16, f"{title}, ms, by prompts a second"), _text(left, 34, "p50 grey, p99 blue", "quiet")]
    parts.append(line([(0, most), (0, 0), (highest, 0)], "axis"))
    for tick in range(int(most / step) + 1):
        y = bottom - tick * step / most * (bottom - TOP)
        parts.append(_text(left - 6, y + 4, f"{tick * step:g}", "quiet", "end"))
    marked = -math.inf
    for row in outcome["rates"]:
        x = left + row["rate"] / highest * width
        if x - marked >= LEAST_DISTANCE:
            parts.append(_text(x, bottom + 18, f"{row['rate']:.3g}", "quiet", "middle"))
            marked = x
    if limit is not None:
        parts.append(line([(0, 1e3 * limit), (highest, 1e3 * limit)], "limit"))
    parts.append(line([(outcome["highest_rate"], 0), (outcome["highest_rate"], most)], "best"))
    parts += [line(points, name) for name, points in lines.items() if points]
    note = "dotted: the highest rate" if limit is None else "dashed: the limit; dotted: the highest rate"
    return [*parts, _text(left, HEIGHT - 6, note, "quiet")]


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def _round_step(most: float) -> float:
    """Return the distance between the ticks of an axis up to `most`: 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(most / 3))
    return power * max(factor for factor in (1, 2, 5) if factor == 1 or power * factor <= most / 3)
