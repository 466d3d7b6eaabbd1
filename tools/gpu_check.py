"""One command for whoever has a GPU for ten minutes: is it right, how fast is it, where does a step's time go?

    python -m tools.gpu_check --out DIR                         # the whole picture, on the GPU
    python -m tools.gpu_check --out DIR --device cpu --quick    # a dry run anywhere
    python -m tools.gpu_check --out DIR --only gpt2 decode-8b   # parts of it again
    python -m tools.gpu_check --show DIR/gpu_check.json --markdown docs/benchmarks.md

Needs torch and transformers, no network and no weights: models have random weights, at the shapes of real ones. Each
section runs in a process of its own, within a time limit. Writes DIR/gpu_check.json and DIR/gpu_check.md after each of
them. Exits with 1 if an answer is wrong or could not be checked; a target of speed that is missed is only told.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tools.bench.table import write_between
from tools.gpu import bar
from tools.gpu.run import run_all
from tools.gpu.sections import SECTIONS, Section
from tools.gpu.target import NOT_ON_CPU

BUDGET_SECONDS = 530.0


def main(argv: list[str] | None = None) -> int:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="folder for the results, and for a log of each section")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--quick", action="store_true", help="tiny models and short runs, to see whether all of it works")
    add("--only", nargs="+", choices=names, metavar="SECTION", help=f"some sections: {', '.join(names)}")
    add("--budget-seconds", type=float, default=BUDGET_SECONDS, help="for all sections (default %(default)g)")
    add("--show", type=Path, nargs="+", metavar="JSON", help="measure nothing: the text of these results; of a section "
        "that several have, the last")  # fmt: skip
    add("--markdown", type=Path, metavar="PAGE", help="write the text there, between the markers of gpu")
    arguments = parser.parse_args(argv)
    if (arguments.out is None) == (arguments.show is None):
        parser.error("Give either --out, to measure, or --show.")
    report = together(arguments.show) if arguments.show else measure(arguments, argv or sys.argv[1:])
    print(bar.as_text(report))
    if arguments.markdown:
        write_between(arguments.markdown, "gpu", bar.as_text(report))
    return 0 if bar.is_correct(report["sections"]) else 1


def measure(arguments: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "created": date.today().isoformat(),
        "version": version(),
        "command": f"python -m tools.gpu_check {' '.join(argv)}",
        "is_dry_run": dry_run(arguments.device, quick=arguments.quick),
        "sections": {},
    }

    def command(section: Section, out: Path, limit_seconds: float) -> list[str]:
        command = [sys.executable, "-m", "tools.gpu.section", section.name, "--out", str(out)]
        command += ["--device", arguments.device, "--limit-seconds", f"{limit_seconds:.0f}"]
        return command + ["--quick"] * arguments.quick

    chosen = [section for section in SECTIONS if arguments.only is None or section.name in arguments.only]
    for name, result in run_all(chosen, command, arguments.out, arguments.budget_seconds):
        report["sections"][name] = result
        print(f"{name}: {result['status']}, {result.get('seconds', 0):.0f} s", file=sys.stderr, flush=True)
        (arguments.out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.out / "gpu_check.md").write_text(bar.as_text(report))
    return report


def dry_run(device: str, *, quick: bool) -> str:
    """What stands in place of a figure; empty where there are figures."""
    if device == "cpu":
        return NOT_ON_CPU
    return "not measured: tiny models" if quick else ""


def together(files: Sequence[Path]) -> dict[str, Any]:
    reports = [json.loads(file.read_text()) for file in files]
    sections = {name: result for report in reports for name, result in report["sections"].items()}
    return {**reports[0], "sections": {s.name: sections[s.name] for s in SECTIONS if s.name in sections}}


def version() -> str:
    """Of the code that was measured, where this is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "of an unknown commit"


if __name__ == "__main__":
    sys.exit(main())
