"""Checks in two calls of at most 270 seconds on a GPU whether answers are right, how fast they are, and why.

    python -m tools.gpu_check figures --out DIR                 # how fast, and where a step's time goes
    python -m tools.gpu_check answers --out DIR                 # whether answers are right
    python -m tools.gpu_check figures --out DIR --only gpt2     # parts of it again
    python -m tools.gpu_check figures --out DIR --resume        # the sections that are not done in DIR
    python -m tools.gpu_check --show DIR/gpu_check.json --markdown docs/benchmarks.md
    python -m tools.gpu_check --dry-run                         # both calls without a GPU, and compiles all kernels

Needs torch and transformers, no network and no weights: the models have the shapes of real ones and random weights.
Each section runs in a process of its own, within a time limit. After each one DIR/gpu_check.json and DIR/gpu_check.md
are written, beside a log of each. Exits with 1 if an answer is wrong or could not be checked, or a fast path is off; a
missed speed target is only reported. `python -m tools.gpu.pack` packs what travels to a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu import dry_run, summary
from tools.gpu.run import run_all
from tools.gpu.sections import NOT_ON_CPU, SECTIONS, Section
from tools.markdown import about, write_between

AT_ONCE = 5  # More sections would not fit into 80 GB together.
MOST_CHARACTERS = 11_000  # The end of a call shows no longer text, because others keep only the end of its output.


def main(argv: list[str] | None = None) -> int:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("call", nargs="?", choices=("figures", "answers"), help="which sections; else those of both")
    add("--out", type=Path, help="folder for the results, and for a log of each section")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--quick", action="store_true", help="tiny models and short runs, which only show that everything works")
    add("--dry-run", action="store_true", help="all sections on a fake GPU, whose kernels are compiled for an H100")
    add("--only", nargs="+", choices=names, default=names, metavar="SECTION", help=f"some of {', '.join(names)}")
    add("--resume", action="store_true", help="leave out the sections that are done in the folder")
    add("--budget-seconds", type=float, default=262.0, help="for all sections (default %(default)g)")
    add("--show", type=Path, nargs="+", metavar="JSON", help="measure nothing; show these results, and "
        "the last one of a section that several files have")  # fmt: skip
    add("--markdown", type=Path, metavar="PAGE", help="write the text there, between the markers of gpu")
    arguments = parser.parse_args(argv)
    if [arguments.out is not None, arguments.show is not None, arguments.dry_run].count(True) != 1:
        parser.error("Give one of --out, to measure, --show and --dry-run.")
    chosen = [one for one in SECTIONS if one.name in arguments.only and arguments.call in (None, one.call)]
    if arguments.dry_run:
        return dry_run.run(chosen)
    report = together(arguments.show) if arguments.show else measure(arguments, chosen)
    text = summary.as_text(report)
    if arguments.markdown:
        write_between(arguments.markdown, "gpu", summary.as_page(report))
    if arguments.out and len(text) > MOST_CHARACTERS:  # The most telling comes first.
        text = f"{text[:MOST_CHARACTERS]}\n... and the rest is in {arguments.out / 'gpu_check.md'}."
    print(text)
    return 0 if summary.is_correct(report["sections"]) else 1


def measure(arguments: argparse.Namespace, chosen: Sequence[Section]) -> dict[str, Any]:
    arguments.out.mkdir(parents=True, exist_ok=True)
    turns = arguments.out / "turns"
    turns.mkdir(exist_ok=True)

    def command(section: Section, out: Path, limit_seconds: float) -> list[str]:
        command = [sys.executable, "-m", "tools.gpu.section", section.name, "--out", str(out)]
        command += ["--device", arguments.device, "--turns", str(turns), "--limit-seconds", f"{limit_seconds:.0f}"]
        return command + ["--quick"] * arguments.quick

    no_figures = NOT_ON_CPU if arguments.device == "cpu" else "not measured: tiny models" if arguments.quick else ""
    report: dict[str, Any] = {
        **about(),
        "is_dry_run": no_figures,  # why figures mean nothing; empty where they count
        "sections": {},
    }
    file = arguments.out / "gpu_check.json"
    sections: dict[str, Any] = report["sections"]
    if arguments.resume and file.exists():
        earlier = json.loads(file.read_text())["sections"]
        sections |= {name: result for name, result in earlier.items() if result["status"] == "done"}
    left = [section for section in chosen if section.name not in sections]
    at_once = 2 if arguments.device == "cpu" else AT_ONCE
    for name, result in run_all(left, command, arguments.out, arguments.budget_seconds, at_once):
        sections[name] = result
        report["sections"] = _in_order(sections)
        print(f"{name}: {result['status']}, {result.get('seconds', 0):.0f} s", file=sys.stderr, flush=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
        (arguments.out / "gpu_check.md").write_text(summary.as_text(report))
    return report


def _in_order(sections: dict[str, Any]) -> dict[str, Any]:
    """Return the sections in their order, and then those of other versions of the check."""
    return {section.name: sections[section.name] for section in SECTIONS if section.name in sections} | sections


def together(files: Sequence[Path]) -> dict[str, Any]:
    reports = [json.loads(file.read_text()) for file in files]
    sections = {name: result for report in reports for name, result in report["sections"].items()}
    return {**reports[0], "sections": _in_order(sections)}


if __name__ == "__main__":
    sys.exit(main())
