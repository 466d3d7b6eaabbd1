"""Draw plots as HTML figures with an inline SVG, in the colours of report.css. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 400
HEIGHT = 240
LEFT = 58
RIGHT = 14
TOP = 12
BOTTOM = 44
# Dashes distinguish the lines for readers who don't see their colours.
DASHES = ("", "6 3", "2 3", "9 3 2 3")


class Series(NamedTuple):
    label: str
    color: str  # a variable of report.css
    points: Sequence[tuple[float, float]]


class Bar(NamedTuple):
    """The parts of a stacked bar, from the bottom up, as values by name."""

    left: float
    right: float
    parts: Mapping[str, float]


class Axes:
    """The axes of a plot. Both begin at 0; the vertical one ends at a round number. `names` label the units of the
    horizontal axis instead of numbers."""

    def __init__(self, x_max: float, y_max: float, x_title: str, y_title: str, names: Sequence[str] = ()) -> None:
        self._x_max = x_max or 1.0
        self._step = _round_step(y_max or 1.0)
        self._y_max = self._step * math.ceil((y_max or 1.0) / self._step - 1e-9)
        self._titles = (x_title, y_title)
        self._names = names

    def x(self, value: float) -> float:
        return LEFT + value / self._x_max * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._y_max * (HEIGHT - BOTTOM - TOP)

    def drawn(self) -> str:
        parts = []
        for i in range(round(self._y_max / self._step) + 1):
            at = self.y(i * self._step)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(_text(LEFT - 6, at + 4, f"{i * self._step:,.10g}", "end"))
        if self._names:
            parts += [_text(self.x(i + 0.5), HEIGHT - 28, name) for i, name in enumerate(self._names)]
        else:
            step = _round_step(self._x_max)
            values = [i * step for i in range(int(self._x_max / step + 1e-9) + 1)]
            parts += [_text(self.x(value), HEIGHT - 28, f"{value:,.10g}") for value in values]
        end = self.y(0)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{end:.1f}" y2="{end:.1f}"/>')
        parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 8, self._titles[0]))
        middle = (HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self._titles[1])}</text>"
        )
        return "".join(parts)


def lines(
    title: str,
    x_title: str,
    y_title: str,
    series: Sequence[Series],
    *,
    limit: float | None = None,
    dots: bool = True,
    curves: bool = True,
) -> str:
    """Return a line plot, with a horizontal line at `limit`; empty if no series has points."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return ""
    points = [point for each in drawn for point in each.points]
    axes = Axes(max(x for x, _ in points), max(limit or 0.0, *(y for _, y in points)), x_title, y_title)
    shapes = [axes.drawn()]
    if limit is not None:
        at = axes.y(limit)
        shapes.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        above = at - 4 if at > TOP + 14 else at + 14
        shapes.append(f'<text class="limit-name" x="{LEFT + 4}" y="{above:.1f}">limit {limit:.4g}</text>')
    for number, each in enumerate(drawn):
        color = f"var(--{each.color})"
        if curves:
            path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in each.points)
            shapes.append(f'<polyline class="curve" points="{path}" style="stroke:{color}" {_dash(number)}/>')
        if dots:
            shapes += [
                f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3" style="fill:{color}">'
                f"<title>{escape(each.label)}: {y:.4g} at {x:.4g}</title></circle>"
                for x, y in each.points
            ]
    description = "; ".join(f"{each.label}: {each.points[0][1]:.4g} to {each.points[-1][1]:.4g}" for each in drawn)
    legend = [_swatch(each.color, each.label, _dash(number) if curves else None) for number, each in enumerate(drawn)]
    return _figure(title, f"{title}, in {y_title} by {x_title}. {description}.", "".join(shapes), legend)


def stacks(
    title: str,
    x_title: str,
    y_title: str,
    bars: Sequence[Bar],
    parts: Mapping[str, tuple[str, str]],
    names: Sequence[str] = (),
) -> str:
    """Return a plot of stacked bars. `parts` have the label and the colour of each part, in the order of the stack."""
    axes = Axes(max(bar.right for bar in bars), max(sum(bar.parts.values()) for bar in bars), x_title, y_title, names)
    shapes = [axes.drawn()]
    for bar in bars:
        base = 0.0
        gap = 0.5 if not names else (axes.x(bar.right) - axes.x(bar.left)) * 0.2
        left = axes.x(bar.left) + gap
        width = axes.x(bar.right) - gap - left
        for name, (label, color) in parts.items():
            value = bar.parts.get(name, 0.0)
            if value > 0:
                top = axes.y(base + value)
                shapes.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{axes.y(base) - top:.1f}" '
                    f'style="fill:var(--{color})"><title>{escape(label)}: {value:.4g}</title></rect>'
                )
            base += value
    description = "; ".join(label for label, _ in parts.values())
    legend = [_swatch(color, label) for label, color in parts.values()]
    return _figure(title, f"{title}, in {y_title} by {x_title}. {description}.", "".join(shapes), legend)


def _figure(title: str, description: str, shapes: str, legend: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}"'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><svg {box}>{shapes}</svg>"
        f'<ul class="legend">{"".join(legend)}</ul></figure>'
    )


def _swatch(color: str, label: str, dash: str | None = None) -> str:
    if dash is None:
        shape = f'<rect width="20" height="10" style="fill:var(--{color})"/>'
    else:
        shape = f'<line class="curve" x1="0" x2="20" y1="5" y2="5" style="stroke:var(--{color})" {dash}/>'
    return f'<li><svg viewBox="0 0 20 10" aria-hidden="true">{shape}</svg>{escape(label)}</li>'


def _dash(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    return f'stroke-dasharray="{dash}"' if dash else ""


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_step(most: float) -> float:
    """Return the distance between the marks of an axis that ends at `most`. It is 1, 2 or 5 times a power of ten, such
    that there are three to seven marks."""
    power: float = 10.0 ** math.floor(math.log10(most / 3))
    return power * max(factor for factor in (1, 2, 5) if factor == 1 or power * factor <= most / 3)
