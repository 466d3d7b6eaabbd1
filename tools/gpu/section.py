"""Runs one section of the GPU check: python -m tools.gpu.section NAME --out FILE [--device cpu] [--quick]

The file is replaced whenever something new is found, so that it is there when this process dies.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from tools.gpu.sections import SECTIONS

DUMP_BEFORE_SECONDS = 3  # before its limit a section that hangs prints its stack


def main(argv: list[str] | None = None) -> int:
    sections = {section.name: section for section in SECTIONS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sections)
    parser.add_argument("--out", type=Path, required=True, help="the file for what is found, as JSON")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit-seconds", type=float, default=600.0)
    arguments = parser.parse_args(argv)
    faulthandler.dump_traceback_later(max(1.0, arguments.limit_seconds - DUMP_BEFORE_SECONDS))
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

    section = sections[arguments.name]
    run = importlib.import_module(section.module).run
    from oaiserve.engine.model.device import select_device
    from tools.gpu.target import Target

    target = Target(select_device(arguments.device), arguments.quick)
    found: dict[str, Any] = {}
    for part in run(target, **section.arguments):
        found |= part
        write(arguments.out, found)
    return 0


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace the file at once: a reader finds all of the old or all of the new content."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
