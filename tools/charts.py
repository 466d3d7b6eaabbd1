"""Draws the throughput of other servers that docs/benchmarks has, in docs/images: python -m tools.charts

Bars are medians over the rounds, and the line on a bar goes from the least to the most. Each group has
a scale of its own, from 0.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tools.bench import table
from tools.bench.workloads import MEASURES, WORKLOADS

DOCS = Path(__file__).parents[1] / "docs"
# How the bar of a server is named and filled.
BARS = {
    "oaiserve": ("oaiserve", "ours"),
    "vllm-cpu": ("vLLM", "peer1"),
    "llama-cpp": ("llama.cpp", "peer2"),
}
WIDTH, LABEL_WIDTH, FIGURES_WIDTH = 720, 110, 190
BAR, GAP, HEAD = 18, 6, 26  # heights

# In the colours of the live page.
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

Spreads = Mapping[str, Sequence[float]]  # by key of BARS, one figure for each round


def charts() -> dict[str, str]:
    """Return the SVGs by the name of their file."""
    peers = json.loads((DOCS / "benchmarks" / "cpu-peers.json").read_text())
    return {"peers-throughput.svg": peer_chart(peers, "Tokens per second, more is better")}


def peer_chart(results: dict[str, Any], title: str) -> str:
    """Return bars of all servers for each measure of throughput, in the order of the table."""
    servers = {name: server for name, server in results["servers"].items() if name in BARS}
    groups = []
    for measure in (each for each in MEASURES if each.more_is_better and each.workload):
        spreads = {name: [*table.values(server["rounds"], measure).values()] for name, server in servers.items()}
        groups.append((f"{WORKLOADS[measure.workload].title}: {measure.title}, {measure.unit}", spreads))
    num_rounds = max(len(server["rounds"]) for server in servers.values())
    return bars(f"{title}: median (least..most) of {num_rounds} rounds", groups)


def bars(title: str, groups: Sequence[tuple[str, Spreads]]) -> str:
    """Return one group of bars below the other, each with a head and a bar for each key that has figures."""
    parts = [text(0, 16, title, "title")]
    y = 30.0
    for head, spreads in groups:
        parts.append(text(0, y + 15, head, "quiet"))
        y += HEAD
        most = max(value for figures in spreads.values() for value in figures)
        for key, figures in spreads.items():
            if figures:
                parts += _bar(y, key, figures, most)
                y += BAR + GAP
        y += GAP
    return document(title, WIDTH, y, parts)


def _bar(y: float, key: str, figures: Sequence[float], most: float) -> list[str]:
    """Return a bar with its name and its figures; the largest figure of the group takes the whole width."""
    scale = (WIDTH - LABEL_WIDTH - FIGURES_WIDTH) / most
    left, right = (LABEL_WIDTH + scale * value for value in (min(figures), max(figures)))
    middle = y + BAR / 2
    name, colour = BARS[key]
    weight = "title" if colour == "ours" else ""
    parts = [
        text(0, y + 13, name, weight),
        rect(LABEL_WIDTH, y, round(scale * statistics.median(figures), 1), BAR, colour),
        text(WIDTH, y + 13, table.spread(figures), weight, "end"),
    ]
    if len(figures) > 1:
        ends = [(round(x, 1), middle + height) for x in (left, right) for height in (-4, 4)]
        parts += [path(ends[:2], "range"), path(ends[2:], "range")]
        parts.append(path([(round(left, 1), middle), (round(right, 1), middle)], "range"))
    return parts


def main() -> None:
    for name, drawing in charts().items():
        (DOCS / "images" / name).write_text(drawing)


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


if __name__ == "__main__":
    main()
