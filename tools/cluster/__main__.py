"""Measures replicas on a real cluster of Ray and prints tables for docs/scale.md: python -m tools.cluster PART

faults   what clients see when something is killed, stopped, replaced or added
costs    what a streamed event costs through Ray, and how much later it comes, beside a server without Ray
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.cluster import costs, faults
from tools.markdown import publish
from tools.server_process import exit_on_sigterm

PARTS = {"faults": faults, "costs": costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        of_part = parts.add_parser(name, help=part.__doc__)
        of_part.add_argument("--json", type=Path, help="write the figures to this file")
        of_part.add_argument("--markdown", type=Path, help="write the table into this page")
        part.add_arguments(of_part)
    arguments = parser.parse_args()
    exit_on_sigterm()
    results, text = PARTS[arguments.part].run(arguments)
    publish(arguments, f"cluster-{arguments.part}", results, text)


if __name__ == "__main__":
    main()
