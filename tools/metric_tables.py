"""Writes the tables of metrics into docs/telemetry.md, from names.py: python -m tools.metric_tables"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from oaiserve.telemetry import names

PAGE = Path(__file__).parents[1] / "docs" / "telemetry.md"


def tables() -> list[str]:
    """Return the tables. Each has a header of its own, which stays the same and by which it is found."""
    return [
        _table("| metric | type | labels | what |", (_row(m, m.type) for m in names.METRICS)),
        _table(
            "| GenAI metric | over OTLP | labels | what |",
            (_row(m, f"`{m.otel_name}`") for m in names.GEN_AI_METRICS),
        ),
        _table("| vLLM's metric | type | labels | what |", (_row(m, m.type) for m in names.VLLM_METRICS)),
    ]


def _table(header: str, rows: Iterable[str]) -> str:
    return "\n".join([header, "|---" * (header.count("|") - 1) + "|", *rows]) + "\n"


def _row(metric: names.Metric, second: str) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {second} | {labels} | {metric.help} |"


def main() -> None:
    page = PAGE.read_text()
    for table in tables():
        header = table.partition("\n")[0]
        before, found, after = page.partition(header)
        if not found:
            raise SystemExit(f"{PAGE} has no table that begins with: {header}")
        page = before + table + "\n" + after.partition("\n\n")[2]
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
