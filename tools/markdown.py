"""Writes tables and figures as markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def as_markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. The first row is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *body]


def number(value: float) -> str:
    """Return the value with at least three digits, and with all digits before the point; an int as it is."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def write_between(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- end of name -->` on a page. Raises ValueError."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{page} has no lines '{begin}' and '{end}' to write between.")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
