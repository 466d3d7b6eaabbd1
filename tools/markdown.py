"""Writes what a tool has measured: tables in markdown, and results in JSON."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tools import machine


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
    begin = f"<!-- {name} -->"
    end = f"<!-- end of {name} -->"
    before, separator, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (separator and found_end):
        raise ValueError(f"{page} has no lines '{begin}' and '{end}' to write between.")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write the results where there is a path, with the day and the command that found them, machine and version."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(about() | results, indent=1) + "\n")


def about() -> dict[str, str]:
    """Return how results were measured: command, day, machine and version."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
    command = " ".join(["python -m", name, *sys.argv[1:]])
    of_now = {"created": date.today().isoformat(), "machine": machine.sentence(), "version": machine.version()}
    return {"name": name, "command": command, **of_now}


def add_publishing(parser: ArgumentParser, markers: str, *, after: str = "") -> None:
    """Add the flags that `results_of` and `publish` read; `after` says how often the results are written meanwhile."""
    parser.add_argument("--json", type=Path, help=f"write the results there{after and f', {after}'}")
    parser.add_argument("--markdown", type=Path, help=f"write what is shown there, between the markers of {markers}")
    parser.add_argument("--show", type=Path, metavar="JSON", help="measure nothing; show these results")


def results_of(arguments: Namespace, measure: Callable[[Namespace], dict[str, Any]]) -> dict[str, Any]:
    """Return the results in the file of --show, or what is measured now, with what `write_json` adds."""
    if arguments.show is None:
        return about() | measure(arguments)
    results: dict[str, Any] = json.loads(arguments.show.read_text())
    return results


def publish(arguments: Namespace, markers: str, results: dict[str, Any], text: str) -> None:
    """Print the text, and write the results and the text to the files of --json and --markdown."""
    print(text)
    write_json(arguments.json, results)
    if arguments.markdown:
        write_between(arguments.markdown, markers, text)
