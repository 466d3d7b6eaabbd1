"""Plots lines as SVG for the documentation, on two logarithmic or two linear axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 64, 130, 20, 48
_COLORS = ("#3b7dd8", "#8a949e", "#d8733b", "#3f9b5b")
# Pages are light or dark, and an SVG can follow them.
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2126; }
.grid { stroke: #c8ced4; stroke-width: .5; }
@media (prefers-color-scheme: dark) { text { fill: #dfe4e8; } .grid { stroke: #444c54; } }
"""

Series = tuple[str, Sequence[tuple[float, float]]]  # label, points


def log_log(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> str:
    """Return the plot. The horizontal axis is marked at the points' own values, the vertical one at 1, 2 and 5 of each
    power of ten."""
    xs = sorted({x for _, points in series for x, _ in points})
    ys = [y for _, points in series for _, y in points]
    marks = _marks(min(ys), max(ys))

    def x_pixel(value: float) -> float:
        return _LEFT + _share(value, xs[0], xs[-1]) * (_WIDTH - _LEFT - _RIGHT)

    def y_pixel(value: float) -> float:
        return _HEIGHT - _BOTTOM - _share(value, marks[0], marks[-1]) * (_HEIGHT - _BOTTOM - _TOP)

    parts = []
    for mark in marks:
        y = y_pixel(mark)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for value in xs:
        parts.append(f'<text x="{x_pixel(value):.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{value:g}</text>')
    parts += _titles(x_title, y_title)
    for color, (label, points) in zip(_COLORS, series, strict=False):
        pixels = [(x_pixel(x), y_pixel(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), (x_value, y_value) in zip(pixels, points, strict=True):
            label_text = f"{label}: {x_value:g}, {y_value:.3g}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{escape(label_text)}</title></circle>'
            )
        x, y = pixels[-1]
        parts.append(f'<text x="{x + 10:.1f}" y="{y + 4:.1f}" style="fill: {color}">{escape(label)}</text>')
    return _svg(title, parts)


def linear(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> str:
    """Return the plot of lines without points, on axes that begin at 0."""
    x_marks = _even_marks(max(x for _, points in series for x, _ in points))
    y_marks = _even_marks(max(y for _, points in series for _, y in points))

    def x_pixel(value: float) -> float:
        return _LEFT + value / x_marks[-1] * (_WIDTH - _LEFT - _RIGHT)

    def y_pixel(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / y_marks[-1] * (_HEIGHT - _BOTTOM - _TOP)

    parts = _titles(x_title, y_title)
    for mark in y_marks:
        y = y_pixel(mark)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for mark in x_marks:
        parts.append(f'<text x="{x_pixel(mark):.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{mark:g}</text>')
    label_y = 0.0
    for color, (label, points) in sorted(zip(_COLORS, series, strict=False), key=lambda row: -row[1][1][-1][1]):
        path = " ".join(f"{x_pixel(x):.1f},{y_pixel(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        label_y = max(label_y + 14, y_pixel(points[-1][1]) + 4)  # labels of lines that end together lie apart
        x = x_pixel(points[-1][0]) + 10
        parts.append(f'<text x="{x:.1f}" y="{label_y:.1f}" style="fill: {color}">{escape(label)}</text>')
    return _svg(title, parts)


def _titles(x_title: str, y_title: str) -> list[str]:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [
        f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>',
        f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>',
    ]


def _svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _even_marks(most: float) -> list[float]:
    """Return the marks from 0 to the first one that is not below `most`."""
    power = 10.0 ** math.floor(math.log10(most))
    step = next(factor * power / 10 for factor in (1, 2, 5, 10, 20) if factor * power / 10 * 6 >= most)
    return [step * index for index in range(math.ceil(most / step) + 1)]


def _share(value: float, least: float, most: float) -> float:
    return math.log(value / least) / math.log(most / least) if most > least else 0.0


def _marks(least: float, most: float) -> list[float]:
    """Return the marks from the last one that is not above `least` to the first one that is not below `most`."""
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    steps = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(step for step in steps if step <= least * (1 + 1e-9))
    last = min(step for step in steps if step >= most * (1 - 1e-9))
    return [step for step in steps if first <= step <= last]
