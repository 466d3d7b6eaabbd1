"""Prints tables and sizes as people read them in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def size(num_bytes: float) -> str:
    """Return a size such as 270 MB, as file managers and the hub show it."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{float(f'{num_bytes / unit:.3g}'):g} {name}"
    return f"{num_bytes / 1e3:.0f} kB"
