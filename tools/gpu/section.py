"""Runs one section of the GPU check: python -m tools.gpu.section NAME --out FILE [--device cpu] [--quick]

The file is replaced whenever something new is found, so that it is there when this process dies.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu.sections import NOT_ON_CPU, SECTIONS, Section, Target

DUMP_BEFORE_SECONDS = 3  # before its limit a section that hangs prints its stack


def main() -> None:
    sections = {section.name: section for section in SECTIONS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sections)
    parser.add_argument("--out", type=Path, required=True, help="the file for what is found, as JSON")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit-seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(max(1.0, arguments.limit_seconds - DUMP_BEFORE_SECONDS))
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    found: dict[str, Any] = {}
    for part in parts(sections[arguments.name], arguments.device, quick=arguments.quick):
        found |= part
        write(arguments.out, found)


def parts(section: Section, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    if section.needs_gpu and device == "cpu":
        yield {"problem": NOT_ON_CPU}
    else:
        module, _, name = section.run.partition(":")
        run = getattr(importlib.import_module(f"tools.gpu.{module}"), name)
        from oaiserve.engine.model.device import select_device
        from tools.gpu.workload import OFF

        for part in run(Target(select_device(device), quick), **section.arguments):
            yield {**part, "off": dict(OFF)}


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace the file at once: a reader finds all of the old or all of the new content."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    main()
