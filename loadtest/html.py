"""Render a report as one HTML page with plots, without scripts and without other files. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from loadtest.report import render
from loadtest.tables import ms

_WIDTH = 640
_HEIGHT = 280
_LEFT = 64
_RIGHT = 16
_BOTTOM = 44
_COLORS = ("#3b7dd8", "#d8733b", "#3ba55d", "#b04fc4", "#c9a227", "#c43b58", "#5b6b7b", "#2aa3a3")
# Time spent waiting has warm colors, work has cold ones, and time outside all phases is grey. Phases that are not
# listed take the colors above in turn.
_PHASE_COLORS = {
    "receive": "#c9a227",
    "tokenize_wait": "#c43b58",
    "tokenize": "#b04fc4",
    "encode_media": "#7a8c1e",
    "queue": "#d8733b",
    "prefill": "#3b7dd8",
    "decode": "#3ba55d",
    "network + client": "#8a949e",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --paper: #fff; --line: #c8ced4; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe4e8; --paper: #14181c; --line: #444c54; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 1340px; padding: 0 1em; }
pre { overflow-x: auto; font-size: 13px; }
figure { display: inline-block; vertical-align: top; max-width: 100%; margin: 0 1em 1.5em 0; }
figcaption { font-weight: 600; }
svg { max-width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 11px; }
.legend { font-size: 13px; max-width: 640px; } .legend span { margin-right: .8em; white-space: nowrap; }
.axis { stroke: var(--ink); } .grid { stroke: var(--line); stroke-width: .5; }
"""

Series = tuple[str, list[tuple[float, float]]]  # label, points


def render_html(report: dict[str, Any]) -> str:
    """Return the whole page."""
    points = report["points"]
    cdf = [(p["label"], _cdf([r["ttft"] for run in p["runs"] for r in run["requests"]])) for p in points]
    figures = [plot("TTFT: share of requests within", "seconds", "share", cdf)]
    if len(points) > 1:
        curves = [(name, _curve(points, f"latency_{name}")) for name in ("p50", "p99")]
        figures.append(plot("Latency against throughput", "completion tokens/s", "seconds", curves, dots=True))
    else:
        runs = points[0]["runs"] if points else []
        dots = [
            (f"run {i + 1}", [(r["intended"], r["latency"]) for r in run["requests"] if r["latency"] is not None])
            for i, run in enumerate(runs)
        ]
        figures.append(plot("Latency of each request", "sent at, seconds", "seconds", dots, dots=True, lines=False))
    for point in points:
        figures.append(phases_plot(point))
        queues = [(name, _gauge(point, name)) for name in ("running", "waiting")]
        figures.append(plot(f"Requests at the server: {point['label']}", "seconds", "requests", queues, dots=True))
    usage = [(p["label"], _gauge(p, "kv_cache_usage")) for p in points]
    figures.append(plot("KV cache in use at the server", "seconds", "share", usage, dots=True))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load test</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Load test</h1>"
        f"<pre>{escape(render(report))}</pre>{''.join(figures)}</body></html>\n"
    )


def _cdf(values: Sequence[float | None]) -> list[tuple[float, float]]:
    """Return the points of the empirical distribution as steps, beginning with 0 at the smallest value."""
    ordered = sorted(value for value in values if value is not None)
    return [(value, (i + up) / len(ordered)) for i, value in enumerate(ordered) for up in (0, 1)]


def _curve(points: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (p["summary"]["completion_tokens_per_second"]["mean"], p["summary"][name]["mean"])
        for p in points
        if name in p["summary"]
    ]


def phases_plot(point: dict[str, Any], num_bins: int = 24) -> str:
    """Plot the mean duration of each phase by time of sending, stacked. The phases are the server's if it reports them,
    else the client's two: to the first token, and after it."""
    requests = [r for run in point["runs"] for r in run["requests"] if r["latency"] is not None]
    if not requests:
        return ""
    over_network = "server" in point["runs"][0]
    rows = [(r["intended"], _phases(r, over_network)) for r in requests]
    names = list(dict.fromkeys(name for _, phases in rows for name in phases))
    width = max(t for t, _ in rows) / num_bins or 1.0
    bins: list[list[dict[str, float]]] = [[] for _ in range(num_bins)]
    for t, phases in rows:
        bins[min(num_bins - 1, int(t / width))].append(phases)
    stacks = [[sum(p.get(n, 0.0) for p in b) / len(b) if b else 0.0 for n in names] for b in bins]
    x, y, frame = _axes(width * num_bins, max(map(sum, stacks)), "sent at, seconds", "seconds")
    colors = [_PHASE_COLORS.get(name, _COLORS[j % len(_COLORS)]) for j, name in enumerate(names)]
    shapes = []
    for i, stack in enumerate(stacks):
        base = 0.0
        for name, color, value in zip(names, colors, stack, strict=True):
            left = x(i * width)
            right = x((i + 1) * width)
            top = y(base + value)
            if value > 0:
                shapes.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" height="{y(base) - top:.1f}" '
                    f'fill="{color}"><title>{escape(name.replace("_", " "))}: {value:.4g} s</title></rect>'
                )
            base += value
    means = [sum(phases.get(name, 0.0) for _, phases in rows) / len(rows) for name in names]
    labels = [f"{name.replace('_', ' ')} {ms(mean)} ms" for name, mean in zip(names, means, strict=True)]
    return _figure(f"Where the time goes: {point['label']}", frame + "".join(shapes), labels, colors)


def _phases(request: dict[str, Any], over_network: bool) -> dict[str, float]:
    """Return the server's phases, and over the network also the rest of the latency. If the server reports none, return
    the two phases that the client sees."""
    phases: dict[str, float] = request["phases"]
    if len(phases) > 1:
        rest = {"network + client": max(0.0, request["latency"] - sum(phases.values()))}
        return phases | rest if over_network else phases
    return {"to first token": request["ttft"], "after it": request["latency"] - request["ttft"]}


def _gauge(point: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """Return a gauge of the server during the last run; empty if its gauges were not read."""
    rows = point["runs"][-1].get("server", {}).get("gauges", {}).get("series", [])
    return [(row["at"], row[name]) for row in rows if row[name] is not None]


def plot(
    title: str, x_title: str, y_title: str, series: Sequence[Series], *, dots: bool = False, lines: bool = True
) -> str:
    """Return a plot as an HTML figure with an SVG in it; empty if no series has points."""
    drawn = [(label, points) for label, points in series if points]
    if not drawn:
        return ""
    x, y, frame = _axes(
        max(px for _, points in drawn for px, _ in points), max(py for _, points in drawn for _, py in points),
        x_title, y_title,
    )  # fmt: skip
    shapes = []
    for i, (label, points) in enumerate(drawn):
        color = _COLORS[i % len(_COLORS)]
        if lines:
            path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)
            shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        if dots:
            shapes += [
                f'<circle cx="{x(px):.1f}" cy="{y(py):.1f}" r="3" fill="{color}">'
                f"<title>{escape(label)}: {px:.4g}, {py:.4g}</title></circle>"
                for px, py in points
            ]
    return _figure(title, frame + "".join(shapes), [label for label, _ in drawn], _COLORS)


def _axes(
    x_max: float, y_max: float, x_title: str, y_title: str
) -> tuple[Callable[[float], float], Callable[[float], float], str]:
    """Return two functions from values to pixels, and the SVG of the axes. Both axes begin at 0; the vertical one ends
    at a round number."""
    x_max = x_max or 1.0
    y_max = y_max or 1.0
    x_step = _round_step(x_max)
    y_step = _round_step(y_max)
    y_max = y_step * math.ceil(y_max / y_step - 1e-9)

    def x(value: float) -> float:
        return _LEFT + value / x_max * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / y_max * (_HEIGHT - _BOTTOM - 10)

    parts = []
    for i in range(int(y_max / y_step + 1e-9) + 1):
        py = y(i * y_step)
        value = i * y_step
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{value:,.10g}</text>')
    for i in range(int(x_max / x_step + 1e-9) + 1):
        value = i * x_step
        parts.append(f'<text x="{x(value):.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{value:,.10g}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_title)}</text>')
    parts.append(
        f'<text transform="translate(12 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>'
    )
    return x, y, "".join(parts)


def _round_step(most: float) -> float:
    """Return the distance between the marks of an axis that ends at `most`: 1, 2 or 5 times a power of ten, so that
    there are three to seven marks."""
    power: float = 10.0 ** math.floor(math.log10(most / 3))
    return power * max(factor for factor in (1, 2, 5) if factor == 1 or power * factor <= most / 3)


def _figure(title: str, content: str, labels: Sequence[str], colors: Sequence[str]) -> str:
    legend = " ".join(
        f'<span><b style="color:{colors[i % len(colors)]}">&#9632;</b> {escape(label)}</span>'
        for i, label in enumerate(labels)
    )
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(title)}"'
    svg = f"<svg {box}>{content}</svg>"
    return f'<figure><figcaption>{escape(title)}</figcaption>{svg}<div class="legend">{legend}</div></figure>'
