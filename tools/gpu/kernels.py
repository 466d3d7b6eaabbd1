"""Compiles every kernel in the shapes that models have, for five kinds of cards, and shows what each takes.

    python -m tools.gpu.kernels [--triton FOLDER]... [--only SHAPE]... [--json FILE] [--markdown FILE] [--show JSON]

No GPU is needed. FOLDER has a version of Triton that `pip install --no-deps --target FOLDER triton==VERSION` put there;
without one, it is the version that is installed. The exit status is 1 if a kernel is beyond its bounds, which a test
holds, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.gpu.compiling import MI300, name_of
from tools.markdown import add_publishing, as_markdown, publish, results_of

ROOT = Path(__file__).parents[2]
CARDS = {80: "A100", 89: "L4, RTX 4090", 90: "H100", 120: "RTX 5090", MI300: "MI300"}
HOPPER = 90
# The most bytes of a thread's registers that are spilled. On an H100, the tile of 128 keys of 64 numbers, which spills
# a few, was faster by 14 to 22 % than any that spills none.
MOST_SPILLED = 320
MOST_SPILLED_ON_HOPPER = {"decode_kernel": 16, "prefill_kernel": 146}
# Instructions of Hopper that multiply matrices of 16 bits: the fastest one takes at least 64 rows.
ON_HOPPER = {
    "shrink_kernel": ({"HMMA"},),
    "expand_kernel": ({"HMMA"},),
    "product_kernel": ({"HGMMA"},),
    "prefill_kernel": ({"HGMMA", "LDGSTS"}, {"HMMA", "LDGSTS"}),
    "decode_kernel": ({"HGMMA", "LDGSTS"}, {"HMMA", "LDGSTS"}),
}
# The most instructions of a product's loop for each weight, with few rows: more take longer than reading the weights.
MOST_INSTRUCTIONS = {"int4": 4.5, "int8": 5.0, "float8": 5.0, "mxfp4": 6.0}
FEW_ROWS = 16
TRIED = "tiles to choose from"  # Such a shape may take more instructions: a start times its tiles before it takes them.
# Bounds are those of the installed Triton, which torch brings. Other versions allocate registers and unroll loops in
# other ways, and may take this many times as much.
BY_OTHER_TRITON = 1.1
WIDE_IN_8_BITS = "heads of 512, cache in FP8"  # prompts of this shape alone have 32 rows on Hopper
MARKERS = "kernels"
Row = Mapping[str, Any]


def resources_of(folder: Path | None, shapes: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Return the version of a Triton and the rows of all cards, see `resources_by_card`."""
    found = list(resources_by_card(folder, shapes))
    return {"triton": found[0]["triton"], "rows": [row for each in found for row in each["rows"]]}


def resources_by_card(folder: Path | None, shapes: Mapping[int, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yield for each card the version of a Triton and a row for each kernel and shape, for the `shapes` with these
    names, or all if there are none. Raises CalledProcessError.

    Triton keeps what it has compiled in its cache, where it finds it by the kernel's source and its own version.
    """
    path = [str(one) for one in (folder, ROOT) if one is not None] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-m", "tools.gpu.resources", json.dumps(shapes)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        try:
            for line in run.stdout:
                if line.startswith('{"triton"'):  # Triton prints errors of its assembler, too.
                    yield json.loads(line)
        except GeneratorExit:
            run.kill()
            raise
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)


def beyond(row: Row, factor: float) -> list[str]:
    """Return sentences about what a kernel takes beyond its bounds, which are for resources times the factor."""
    if "problem" in row:
        return [row["problem"]]
    kernel = row["kernel"]
    found = []
    if row["programs"] < row["programs_counted"]:
        found.append(
            f"a multiprocessor runs {row['programs']} of its programs, and the plan counts on {row['programs_counted']}"
        )
    most_spilled = int(factor * most_spilled_of(kernel, row["capability"]))
    if row["spilled_bytes"] > most_spilled:
        found.append(f"spills {row['spilled_bytes']} bytes of a thread's registers, of at most {most_spilled}")
    most = MOST_INSTRUCTIONS.get(row.get("kind", ""))
    if most is not None:
        most = round(factor * most, 2)
    has_few_rows = row.get("rows") == FEW_ROWS and row["capability"] in CARDS and not row["shape"].endswith(TRIED)
    if most is not None and has_few_rows and not 0 < row["instructions_per_weight"] <= most:
        found.append(f"takes {row['instructions_per_weight']} instructions for a weight, of at most {most}")
    if row["capability"] == HOPPER and row["is_in_16_bits"] and kernel in ON_HOPPER:
        wanted = ON_HOPPER[kernel]
        if kernel == "prefill_kernel" and row["shape"] != WIDE_IN_8_BITS:
            wanted = wanted[:1]
        if not any(names <= set(row["instructions"]) for names in wanted):
            found.append(f"multiplies with {', '.join(row['instructions'])}")
    return found


def most_spilled_of(kernel: str, capability: int) -> int:
    return MOST_SPILLED_ON_HOPPER.get(kernel, 0) if capability == HOPPER else MOST_SPILLED


def problems(rows: Iterable[Row], factor: float = 1.0) -> list[str]:
    return [
        f"{row['kernel']} on {name_of(row['capability'])}, {row['shape']}: {problem}"
        for row in rows
        for problem in beyond(row, factor)
    ]


def as_text(results: Mapping[str, Any]) -> str:
    """Return a table of the kernels that spill registers for each version of Triton, with the most of each resource."""
    lines = []
    for one in results["tritons"]:
        number = len({row["shape"] for row in one["rows"]})
        lines += [f"Triton {one['triton']}, {len(one['rows'])} kernels of {number} shapes, of which these spill:", ""]
        lines += [*as_markdown(_table(one["rows"])), ""]
        lines += ["Instructions of a product's loop for each weight, with up to 16 rows:", ""]
        lines += [*as_markdown(_instructions(one["rows"])), ""]
    return "\n".join(lines).strip()


def _table(rows: Sequence[Row]) -> list[list[str]]:
    capabilities = sorted({row["capability"] for row in rows})
    table = [["kernel", *(f"{name_of(capability)} ({CARDS[capability]})" for capability in capabilities)]]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        if not any(row["spilled_bytes"] for row in own):
            continue
        cells = [_cell([row for row in own if row["capability"] == capability]) for capability in capabilities]
        table.append([kernel.removesuffix("_kernel"), *cells])
    return table


def _instructions(rows: Sequence[Row]) -> list[list[str]]:
    """Return a table of products in few bits: their instructions, registers, spilled bytes and shared bytes."""
    few = [row for row in rows if row.get("kind") in MOST_INSTRUCTIONS and row["rows"] == FEW_ROWS]
    capabilities = sorted({row["capability"] for row in few})
    table = [["product", *(f"{name_of(capability)} ({CARDS[capability]})" for capability in capabilities)]]
    for shape in dict.fromkeys(row["shape"] for row in few):
        own = {row["capability"]: row for row in few if row["shape"] == shape}
        cells = []
        for capability in capabilities:
            row = own.get(capability)
            numbers = () if row is None else (row[name] for name in ("registers", "spilled_bytes", "shared_bytes"))
            found = "" if row is None else f"{row['instructions_per_weight']}"
            cells.append(" / ".join([found, *(f"{one:,}" for one in numbers)]))
        table.append([shape, *cells])
    return table


def _cell(rows: Sequence[Row]) -> str:
    """Return the most registers, spilled bytes and shared bytes of a kernel, and the fewest programs."""
    if not rows:
        return ""
    most = [max(row[name] for row in rows) for name in ("registers", "spilled_bytes", "shared_bytes")]
    return " / ".join(f"{one:,}" for one in (*most, min(row["programs"] for row in rows)))


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    shapes = dict.fromkeys(CARDS, arguments.only)
    return {"tritons": [resources_of(folder, shapes) for folder in arguments.triton or [None]]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", type=Path, action="append", metavar="FOLDER", help="a folder with a Triton")
    parser.add_argument("--only", action="append", default=[], metavar="SHAPE", help="the name of a shape")
    add_publishing(parser, MARKERS)
    arguments = parser.parse_args(argv)
    results = results_of(arguments, _measured)
    publish(arguments, MARKERS, results, as_text(results))
    found = []
    for one in results["tritons"]:
        factor = 1.0 if one["triton"] == version("triton") else BY_OTHER_TRITON
        found += [f"Triton {one['triton']}: {problem}" for problem in problems(one["rows"], factor)]
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
