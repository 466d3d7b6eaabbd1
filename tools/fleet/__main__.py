"""Simulates fleets and prints tables for docs/scale.md: python -m tools.fleet PART

four    four replicas beside one with four times the cache, with the real scheduler, under all policies
model   the model of a replica beside the real one, on the same requests
scale   1,000 replicas and 100,000 requests a second, with a burst, a zone that fails and a rolling update
slo     the highest rate within a SLO, under all policies
state   what a router takes: time for a decision, memory for a replica and for a prefix
apart   prefill on replicas of its own, at several shares of them
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.fleet import apart, four, model, scale, slo, state
from tools.markdown import publish

PARTS = {"four": four, "model": model, "scale": scale, "slo": slo, "state": state, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        of_part = parts.add_parser(name, help=part.__doc__, description=part.__doc__)
        of_part.add_argument("--json", type=Path, help="write the figures to this file")
        of_part.add_argument("--markdown", type=Path, help="write the table into this page")
        part.add_arguments(of_part)
    arguments = parser.parse_args()
    results, text = PARTS[arguments.part].run(arguments)
    publish(arguments, f"fleet-{arguments.part}", results, text)


if __name__ == "__main__":
    main()
