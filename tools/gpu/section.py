"""Runs one section of the GPU check: python -m tools.gpu.section NAME --out FILE [--device cpu] [--quick]

The file is replaced whenever something new is found, so that it is there when this process dies. On the fake device,
`meta`, a file beside it has the launches of kernels.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.gpu.sections import NOT_ON_CPU, SECTIONS, Section, Target
from tools.gpu.turns import Turns

DUMP_BEFORE_SECONDS = 3  # before its limit a section that hangs prints its stack
LAUNCHES_SUFFIX = ".launches.json"


def main() -> None:
    sections = {section.name: section for section in SECTIONS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sections)
    parser.add_argument("--out", type=Path, required=True, help="the file for what is found, as JSON")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "meta"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--turns", type=Path, help="folder for locks, if other sections use the device, too")
    parser.add_argument("--limit-seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(max(1.0, arguments.limit_seconds - DUMP_BEFORE_SECONDS))
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    section = sections[arguments.name]
    turns = Turns(arguments.turns, SECTIONS.index(section)) if arguments.turns else None
    found: dict[str, Any] = {}
    with noted_launches(arguments.device, arguments.out.with_suffix(LAUNCHES_SUFFIX)):
        for part in parts(section, arguments.device, quick=arguments.quick, turns=turns):
            found |= part
            write(arguments.out, found)


@contextmanager
def noted_launches(device: str, path: Path) -> Iterator[None]:
    """On the fake device, write the launches of the block to a file, however the block ends."""
    if device != "meta":
        yield
        return
    from tools.gpu.fake_device import fake_device

    with fake_device() as launches:
        try:
            yield
        finally:
            launches.write(path)


def parts(section: Section, device: str, *, quick: bool, turns: Turns | None = None) -> Iterator[dict[str, Any]]:
    if section.needs_gpu and device == "cpu":
        yield {"problem": NOT_ON_CPU}
    else:
        module, _, name = section.run.partition(":")
        run = getattr(importlib.import_module(f"tools.gpu.{module}"), name)
        import torch

        from oaiserve.engine.model.device import select_device
        from tools.gpu.workload import OFF

        target = Target(torch.device(device) if device == "meta" else select_device(device), quick, turns)
        kernels = noted_kernels()
        for part in run(target, **section.arguments):
            yield {**part, "off": dict(OFF), "kernels": dict(kernels)}


def noted_kernels() -> dict[str, float]:
    """Return counts, as they grow, of the kernels that Triton finds in its cache, and of those that it compiles."""
    found = {"found": 0, "compiled": 0, "compile_seconds": 0.0}
    try:
        from triton import knobs
    except ImportError:  # There are no kernels.
        return {}

    def note(*, times: Any, cache_hit: bool, **_: Any) -> None:
        found["found" if cache_hit else "compiled"] += 1
        if not cache_hit:
            found["compile_seconds"] += times.total / 1e6

    knobs.compilation.listener = note
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace the file at once: a reader finds all of the old or all of the new content."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    main()
