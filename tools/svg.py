"""Writes SVG for the documentation: text, boxes and bars in colours that follow the reader's light or dark system."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# Those of the live page.
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1a202b; }
.title { font-weight: 600; }
.quiet { fill: #515b6b; }
.small { font-size: 11px; }
.range { stroke: #0b1220; fill: none; stroke-width: 1.2; }
.ours { fill: #2563eb; }
.peer1 { fill: #8b95a5; }
.peer2 { fill: #b3bac6; }
@media (prefers-color-scheme: dark) {
  text { fill: #e7ebf1; }
  .quiet { fill: #a5b0c0; }
  .range { stroke: #f4f6fa; }
  .ours { fill: #3b76d6; }
  .peer1 { fill: #7b879a; }
  .peer2 { fill: #566174; }
}
"""


def document(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, style: str, radius: float = 3) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{style}"/>'


def path(points: Iterable[tuple[float, float]], style: str) -> str:
    return f'<path d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}" class="{style}"/>'
