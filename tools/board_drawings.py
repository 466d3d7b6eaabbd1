"""Draws where the panels of Grafana's dashboards are, in docs/images: python -m tools.board_drawings

The JSON of the dashboards says where each panel is and what its title is. The marks in a panel stand for its kind (one
number, lines, a heatmap) and show no values.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import svg

ROOT = Path(__file__).parents[1]
COLUMN, ROW = 40, 14  # pixels for one column of Grafana's 24, and for one unit of height
HEAD = 34
LINES = ((0.0, 0.7), (0.2, 0.45), (0.35, 0.55), (0.55, 0.25), (0.75, 0.4), (1.0, 0.15))  # as shares of the panel
HEAT = (0.3, 0.8, 0.5, 0.9, 0.4, 0.7, 0.2, 0.6)


def drawings() -> dict[str, str]:
    """Return the SVG of each dashboard by the name of its file."""
    found = {}
    for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        found[path.name.replace("oaiserve-", "board-").replace(".json", ".svg")] = drawing(board)
    return found


def drawing(board: dict[str, Any]) -> str:
    parts = [svg.text(0, 20, board["title"], "title")]
    bottom = 0
    for panel in board["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] * COLUMN, HEAD + place["y"] * ROW
        bottom = max(bottom, y + place["h"] * ROW)
        if panel["type"] == "row":
            parts.append(svg.text(x, y + 12, panel["title"], "title small"))
        else:
            parts += _panel(panel, x + 2, y + 2, place["w"] * COLUMN - 4, place["h"] * ROW - 4)
    return svg.document(f"Panels of the dashboard {board['title']}", 24 * COLUMN, bottom + 2, parts)


def _panel(panel: dict[str, Any], x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield svg.rect(x, y, width, height, "panel")
    titles = textwrap.wrap(panel["title"], int((width - 16) / 6.2))
    for number, line in enumerate(titles):
        yield svg.text(x + 8, y + 16 + 13 * number, line, "small")
    top = y + 24 + 13 * (len(titles) - 1)
    yield from MARKS[panel["type"]](x + 8, top, width - 16, y + height - 8 - top)


def _number(x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield svg.rect(x + width * 0.3, y + height * 0.35, width * 0.4, 8, "mark")


def _lines(x: float, y: float, width: float, height: float) -> Iterator[str]:
    for share in (1.0, 0.6):
        points = [
            (round(x + width * along, 1), round(y + height * (1 - share * (1 - down)), 1)) for along, down in LINES
        ]
        yield svg.path(points, "sketch")


def _heatmap(x: float, y: float, width: float, height: float) -> Iterator[str]:
    for number, share in enumerate(HEAT):
        left = x + width * number / len(HEAT)
        yield svg.rect(round(left, 1), round(y + height * (1 - share), 1), round(width / len(HEAT) - 2, 1), 6, "mark")


MARKS = {"stat": _number, "timeseries": _lines, "heatmap": _heatmap}


def main() -> None:
    for name, drawn in drawings().items():
        (ROOT / "docs" / "images" / name).write_text(drawn)


if __name__ == "__main__":
    main()
