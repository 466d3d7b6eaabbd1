"""`run_part` is the command line of a tool with several parts, each of which measures something and makes a table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tools.markdown import publish


def run_part(parts: Mapping[str, ModuleType], markers: str, description: str | None) -> None:
    """Run the part that the command line names, and publish its table between the markers `{markers}-{part}`.

    A part is a module with `add_arguments(parser)` and `run(arguments)`, which returns results for JSON and the table.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = parser.add_subparsers(dest="part", required=True)
    for name, part in parts.items():
        of_part = names.add_parser(name, help=part.__doc__)
        of_part.add_argument("--json", type=Path, help="write the figures to this file")
        of_part.add_argument("--markdown", type=Path, help="write the table into this page")
        part.add_arguments(of_part)
    arguments = parser.parse_args()
    results, text = parts[arguments.part].run(arguments)
    publish(arguments, f"{markers}-{arguments.part}", results, text)
