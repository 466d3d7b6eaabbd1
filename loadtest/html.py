"""The report as one HTML page with plots, without scripts and without anything from elsewhere. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from loadtest.report import render

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 280, 64, 44
_COLORS = ("#3b7dd8", "#d8733b", "#3ba55d", "#b04fc4", "#c9a227", "#c43b58", "#5b6b7b", "#2aa3a3")

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --paper: #fff; --line: #c8ced4; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe4e8; --paper: #14181c; --line: #444c54; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 1340px; padding: 0 1em; }
pre { overflow-x: auto; font-size: 13px; }
figure { display: inline-block; margin: 0 1em 1em 0; } figcaption { font-weight: 600; }
svg { max-width: 100%; } svg text { fill: var(--ink); font-size: 11px; }
.axis { stroke: var(--ink); } .grid { stroke: var(--line); stroke-width: .5; }
.valid { color: #2f8f4e; } .suspect { color: #b8860b; } .invalid { color: #c43b3b; }
"""

Series = tuple[str, list[tuple[float, float]]]  # label, points


def render_html(report: dict[str, Any]) -> str:
    """The whole page."""
    points = report["points"]
    verdicts = ", ".join(f'{escape(p["label"])}: <b class="{p["verdict"]}">{p["verdict"]}</b>' for p in points)
    cdf = [(p["label"], _cdf([r["ttft"] for run in p["runs"] for r in run["requests"]])) for p in points]
    figures = [plot("TTFT: share of requests within", "seconds", "share", cdf)]
    figures += [phases_plot(p) for p in points]
    if len(points) > 1:
        curves = [(name, _curve(points, f"latency_{name}")) for name in ("p50", "p99")]
        figures.append(plot("Latency against throughput", "completion tokens/s", "seconds", curves, dots=True))
    else:
        runs = points[0]["runs"] if points else []
        over_time = [(f"run {i + 1}", _throughput(run["requests"])) for i, run in enumerate(runs)]
        figures.append(plot("Throughput over time", "seconds", "completion tokens/s", over_time))
        dots = [(f"run {i + 1}", _latencies(run["requests"])) for i, run in enumerate(runs)]
        figures.append(plot("Latency of each request", "sent at, seconds", "seconds", dots, dots=True, lines=False))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load test</title>'
        f"<style>{_STYLE}</style></head><body><h1>Load test</h1><p>{verdicts}</p>"
        f"{''.join(figures)}<pre>{escape(render(report))}</pre><h2>Definitions</h2><dl>"
        + "".join(f"<dt><b>{escape(k)}</b></dt><dd>{escape(v)}</dd>" for k, v in report["definitions"].items())
        + "</dl></body></html>\n"
    )


def _cdf(values: Sequence[float | None]) -> list[tuple[float, float]]:
    found = sorted(value for value in values if value is not None)
    return [(value, (i + 1) / len(found)) for i, value in enumerate(found)]


def _curve(points: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (p["summary"]["completion_tokens_per_second"]["mean"], p["summary"][name]["mean"])
        for p in points
        if name in p["summary"]
    ]


def _throughput(requests: Sequence[dict[str, Any]], num_bins: int = 40) -> list[tuple[float, float]]:
    """Tokens are spread evenly between a request's first and last."""
    ok = [r for r in requests if r["latency"] is not None]
    end = max((r["intended"] + r["latency"] for r in ok), default=0.0)
    width = end / num_bins or 1.0
    bins = [0.0] * num_bins
    for r in ok:
        first, last = r["intended"] + r["ttft"], r["intended"] + r["latency"]
        for i in range(num_bins):
            low, high = max(first, i * width), min(last, (i + 1) * width)
            if last > first and high > low:
                bins[i] += r["completion_tokens"] * (high - low) / (last - first)
            elif last == first and i == min(num_bins - 1, int(last / width)):
                bins[i] += r["completion_tokens"]
    return [((i + 0.5) * width, tokens / width) for i, tokens in enumerate(bins)]


def _latencies(requests: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(r["intended"], r["latency"]) for r in requests if r["latency"] is not None]


def phases_plot(point: dict[str, Any], num_bins: int = 24) -> str:
    """Mean of each phase by time of sending, stacked: the server's where it tells them, else the client's two."""
    requests = [r for run in point["runs"] for r in run["requests"] if r["latency"] is not None]
    if not requests:
        return ""
    rows = [(r["intended"], r["phases"] if len(r["phases"]) > 1 else _client_phases(r)) for r in requests]
    names = list(dict.fromkeys(name for _, phases in rows for name in phases))
    width = max(t for t, _ in rows) / num_bins or 1.0
    bins: list[list[dict[str, float]]] = [[] for _ in range(num_bins)]
    for t, phases in rows:
        bins[min(num_bins - 1, int(t / width))].append(phases)
    stacks = [[sum(p.get(n, 0.0) for p in b) / len(b) if b else 0.0 for n in names] for b in bins]
    x, y, frame = _axes(width * num_bins, max(map(sum, stacks)), "sent at, seconds", "seconds")
    shapes = []
    for i, stack in enumerate(stacks):
        base = 0.0
        for j, value in enumerate(stack):
            left, right, top = x(i * width), x((i + 1) * width), y(base + value)
            color = _COLORS[j % len(_COLORS)]
            shapes.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" height="{y(base) - top:.1f}" '
                f'fill="{color}"><title>{escape(names[j])}: {value:.4g} s</title></rect>'
            )
            base += value
    return _figure(f"Phases, {point['label']}", frame + "".join(shapes), names)


def _client_phases(request: dict[str, Any]) -> dict[str, float]:
    return {"to first token": request["ttft"], "after it": request["latency"] - request["ttft"]}


def plot(
    title: str, x_title: str, y_title: str, series: Sequence[Series], *, dots: bool = False, lines: bool = True
) -> str:
    """An SVG figure; empty where there is nothing to draw."""
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
    return _figure(title, frame + "".join(shapes), [label for label, _ in drawn])


def _axes(
    x_max: float, y_max: float, x_title: str, y_title: str
) -> tuple[Callable[[float], float], Callable[[float], float], str]:
    """Functions from values to pixels, and the frame. Both axes begin at 0."""
    x_max, y_max = x_max or 1.0, y_max or 1.0

    def x(value: float) -> float:
        return _LEFT + value / x_max * (_WIDTH - _LEFT - 10)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / y_max * (_HEIGHT - _BOTTOM - 10)

    parts = []
    for i in range(5):
        px, py = x(x_max * i / 4), y(y_max * i / 4)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y_max * i / 4:.3g}</text>')
        parts.append(f'<text x="{px:.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{x_max * i / 4:.3g}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_title)}</text>')
    parts.append(
        f'<text transform="translate(12 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>'
    )
    return x, y, "".join(parts)


def _figure(title: str, content: str, labels: Sequence[str]) -> str:
    legend = " ".join(
        f'<span><b style="color:{_COLORS[i % len(_COLORS)]}">&#9632;</b> {escape(label)}</span>'
        for i, label in enumerate(labels)
    )
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(title)}"'
    svg = f"<svg {box}>{content}</svg>"
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}<div>{legend}</div></figure>"
