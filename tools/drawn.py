"""Reduces results to the numbers that the documentation draws: python -m tools.drawn

Each file of docs/benchmarks keeps what its tables and charts need, in as few digits as leave them the same, and how it
was measured. The whole file, as a tool has written it, belongs to the release that it was measured for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from tools import charts
from tools.bench import step, table
from tools.gpu import summary
from tools.markdown import about

FOLDER = Path(__file__).parents[1] / "docs/benchmarks"
Draw = Callable[[dict[str, Any]], str]
DRAWN: dict[str, Draw] = {
    "cpu-peers": lambda results: table.report(results) + charts.chart(results),
    "gpu": summary.as_page,
    "step": step.report,
}
FEWEST_DIGITS = 3


def reduced(results: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Return the results without what changes nothing in their drawing. Those given are changed, too."""
    text = draw(results)

    def is_same() -> bool:
        try:
            return draw(results) == text
        except (KeyError, TypeError, ValueError):
            return False

    def reduce(value: Any) -> None:
        for place in [*value] if isinstance(value, dict) else range(len(value)):
            if value is results and place in about():
                continue
            before = copy(value)
            if isinstance(value, dict):
                del value[place]
                if is_same():
                    continue
                value.clear()
                value.update(before)  # in the old order, which may be that of rows
            part = value[place]
            if isinstance(part, dict | list):
                reduce(part)
            elif isinstance(part, float):
                for digits in range(FEWEST_DIGITS, 18):
                    value[place] = float(f"{part:.{digits}g}")
                    if is_same():
                        break

    reduce(results)
    return results


def as_lines(results: dict[str, Any]) -> str:
    """Return the results as JSON with a line for each short part."""

    def lines(value: Any, indent: str) -> str:
        short = json.dumps(value)
        if len(short) <= 100 or not isinstance(value, dict | list):
            return short
        inner = indent + " "
        if isinstance(value, dict):
            parts = [f"{json.dumps(key)}: {lines(part, inner)}" for key, part in value.items()]
        else:
            parts = [lines(part, inner) for part in value]
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"

    return lines(results, "") + "\n"


def main() -> None:
    for name, draw in DRAWN.items():
        file = FOLDER / f"{name}.json"
        before = file.stat().st_size
        file.write_text(as_lines(reduced(json.loads(file.read_text()), draw)))
        print(f"{name}: {before:,} bytes became {file.stat().st_size:,}")


if __name__ == "__main__":
    main()
