"""Compares products and attention with what the CPU's instructions multiply at most: python -m tools.bench.limits

For each variant of the native code that this CPU runs, one thread multiplies rows with weights in its caches, and
computes the attention of a prompt's last tokens. A share is of the fastest instruction for such numbers. Times are CPU
times of the thread, and the shortest of many, because the machine may be busy.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oaiserve.engine.executors.native import build, prebuilt, variants
from tools.markdown import add_publishing, as_markdown, number, publish, results_of

SOURCE = Path(__file__).with_suffix(".cpp")
FLOATS = ("vfmadd231ps",)
HALVES = ("tdpbf16ps", "vdpbf16ps", *FLOATS)
INTEGERS = ("tdpbssd", "vpdpbusd", "vpmaddubsw")
SHORTS = ("vpdpwssd", "vpmaddwd")
INSTRUCTIONS = {  # for those numbers; INTEGERS for others
    "float32": FLOATS,
    "bfloat16": HALVES,
    "attention,float32": FLOATS,
    "attention,bfloat16": HALVES,
    "attention,int8": SHORTS,
}

Measured = dict[str, dict[str, float]]  # billions of operations per second, by the name and by the number of rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant, in turns (default 3)")
    add_publishing(parser, "the best variant")
    arguments = parser.parse_args()
    results = results_of(arguments, measured)
    publish(arguments, f"limits of {next(iter(results['variants']))}", results, report(results))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the speeds of each variant, the highest of all rounds."""
    features = prebuilt.usable_features()
    usable = [each for each in variants.VARIANTS if each.machine == platform.machine() and each.features <= features]
    found: dict[str, Measured] = {}
    with TemporaryDirectory() as folder:
        programs = {variant.name: compiled(variant, Path(folder) / variant.name) for variant in usable}
        for _ in range(arguments.rounds):
            for name, program in programs.items():
                output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
                add(output, found.setdefault(name, {}))
    return {"variants": found}


def compiled(variant: variants.Variant, program: Path) -> Path:
    flags = [flag for flag in variants.FLAGS if flag not in ("-shared", "-fPIC", "-fvisibility=hidden")]
    command = ["g++", *flags, *variant.flags, f"-I{build.SOURCES}", str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def add(output: str, found: Measured) -> None:
    """Add a program's lines to what has been found, if they are more."""
    for line in output.splitlines():
        name, rows, speed = line.split()
        of_name = found.setdefault(name, {})
        of_name[rows] = max(float(speed), of_name.get(rows, 0.0))


def report(results: dict[str, Any]) -> str:
    found: dict[str, Measured] = results["variants"]
    formats = [name for name, speeds in next(iter(found.values())).items() if "0" not in speeds]
    rows = list(next(iter(found.values()))[formats[0]])
    table = [("numbers", *(f"{name}: limit; {'/'.join(rows)} rows" for name in found))]
    for name in formats:
        cells = []
        for of_variant in found.values():
            limit = limit_of(name, of_variant)
            shares = "/".join(f"{100 * of_variant[name][each] / limit:.0f}" for each in rows)
            cells.append(f"{number(limit)}; {shares}")
        table.append((name.replace(",", ", "), *cells))
    about = f"{results['machine']}; {results['created']}; limits in billions of operations per second, shares in %."
    return "\n".join([*textwrap.wrap(about, 120), "", *as_markdown(table)])


def limit_of(name: str, found: Measured) -> float:
    return max(found[each]["0"] for each in INSTRUCTIONS.get(name, INTEGERS) if each in found)


if __name__ == "__main__":
    main()
