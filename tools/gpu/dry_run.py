"""Runs sections of the GPU check on a fake GPU, and compiles each variant of a kernel that they launch for an H100."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.launches import Variant, read
from tools.gpu.run import run_all
from tools.gpu.section import LAUNCHES_SUFFIX
from tools.gpu.sections import Section
from tools.gpu.summary import compared
from tools.markdown import as_markdown

LIMIT_SECONDS = 1800.0
AT_ONCE = 2


def run(sections: Sequence[Section], out: Path | None = None) -> int:
    """Print a line for each section and for each kernel. Return 1 if a section is not done or a kernel does not fit."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = {}
        for name, result in run_all(sections, _command, folder, LIMIT_SECONDS, AT_ONCE):
            results[name] = result
            print(_line(name, result, folder), flush=True)
        launched = launched_by({name: folder / f"{name}{LAUNCHES_SUFFIX}" for name in results})
    sections_seconds = time.monotonic() - began
    are_done = all(map(is_whole, results.values()))
    do_fit = check_kernels(launched)
    print(
        f"{len(results)} sections in {sections_seconds:.0f} s, {len(launched)} variants of kernels in "
        f"{time.monotonic() - began - sections_seconds:.0f} s."
    )
    return 0 if are_done and do_fit else 1


def is_whole(result: Mapping[str, Any]) -> bool:
    """Return whether a section ended well, with all its parts and cases, and with all features on."""
    has_all = not result.get("problems") and not compared(result, equal=False)
    return result["status"] == "done" and not result.get("off") and has_all


def _command(section: Section, out: Path, limit_seconds: float) -> list[str]:
    command = [sys.executable, "-m", "tools.gpu.section", section.name, "--out", str(out)]
    return [*command, "--device", "meta", "--limit-seconds", f"{limit_seconds:.0f}"]


def _line(name: str, result: Mapping[str, Any], folder: Path) -> str:
    launched, peak_bytes = read(folder / f"{name}{LAUNCHES_SUFFIX}")
    line = f"{name}: {result['status']}, {result.get('seconds', 0):.0f} s, "
    line += f"{sum(launched.values()):,} launches of {len(launched)} variants of kernels, "
    line += f"{peak_bytes / 1e9:.1f} GB of weights and KV caches"
    for feature, reason in result.get("off", {}).items():
        line += f"\n    {feature} is off: {reason}"
    for name, found in result.items():
        if compared(found, equal=False):
            line += f"\n    {name}: {found}"
    said = [result.get("problem", ""), *(f"{part}: {text}" for part, text in result.get("problems", {}).items())]
    return line + "".join(f"\n    {text}" for problem in said for text in problem.splitlines())


def launched_by(files: Mapping[str, Path]) -> dict[Variant, list[str]]:
    """Return the names of the sections that launched a variant, for each."""
    launched: dict[Variant, list[str]] = defaultdict(list)
    for name, path in files.items():
        for variant in read(path).counts:
            launched[variant].append(name)
    return dict(launched)


def check_kernels(launched: Mapping[Variant, Sequence[str]]) -> bool:
    """Compile all variants, and print the problem of each that has one, and a row for each kernel. Return whether all
    fit."""
    from tools.gpu.compiling import HOPPER, SHARED_BYTES, Resources, compiled

    os.environ["TRITON_INTERPRET"] = "0"
    found: dict[str, list[Resources]] = defaultdict(list)
    do_fit = True
    for variant, resources in compiled(launched):
        found[variant.kernel].append(resources)
        if resources.problem:
            do_fit = False
            print(f"{variant} {resources.problem}. Launched by {', '.join(launched[variant])}.", flush=True)
    rows = [
        [kernel, len(all_of), *(max(of_one[place] for of_one in all_of) for place in range(3))]
        for kernel, all_of in sorted(found.items())
    ]
    head = ["kernel", "variants", "registers", "bytes spilled", f"shared bytes, of {SHARED_BYTES[HOPPER]:,}"]
    print("\n".join(as_markdown([head, *([f"{cell}" for cell in row] for row in rows)])))
    return do_fit
