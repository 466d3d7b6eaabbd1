"""Compiles the Triton kernels for an H100 or H200 without a GPU, and writes the table of their resources.

    python -m tools.gpu.compiled [--triton 3.6.0 ...] --markdown docs/benchmarks.md

Each version of Triton that is named is downloaded into a folder of its own; without any, the installed one compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from tools.markdown import as_markdown, write_between

SCRIPT = "tests/engine/model/gpu/triton_compile.py"
# Of one multiprocessor of sm_90: registers, bytes of shared memory (1,024 of each program are the system's), and warps.
REGISTERS, SHARED_BYTES, WARPS = 65_536, 233_472, 64


def programs_at_once(kernel: Mapping[str, Any]) -> int:
    """Return how many programs of a kernel fit into a multiprocessor."""
    num_warps = kernel["constants"].get("num_warps", 4)
    by_registers = REGISTERS // (-(-max(1, kernel["registers"]) // 8) * 8 * num_warps * 32)
    return min(by_registers, SHARED_BYTES // (kernel["shared_bytes"] + 1024), WARPS // num_warps)


def compiled(folder: Path | None) -> list[dict[str, Any]]:
    """Compile all kernels, with the Triton in a folder or the installed one."""
    path = [str(folder)] * (folder is not None) + [str(Path.cwd())]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(path)}
    if folder is not None:
        environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    run = subprocess.run([sys.executable, SCRIPT], env=environment, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found


def table(found: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each kernel, of all its types, after the head: from the least to the most of each resource."""
    rows = [["kernel", "compiled", "registers", "shared bytes", "programs on a multiprocessor"]]
    for name, group in groupby(sorted(found, key=itemgetter("kernel")), itemgetter("kernel")):
        same = list(group)
        columns = [[k[key] for k in same] for key in ("registers", "shared_bytes")]
        columns.append([programs_at_once(k) for k in same])
        cells = [f"{min(c):,}" if min(c) == max(c) else f"{min(c):,} to {max(c):,}" for c in columns]
        rows.append([f"`{name.removesuffix('_kernel')}`", str(len(same)), *cells])
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", nargs="+", default=[], metavar="VERSION")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write it there, between the markers of compiled")
    arguments = parser.parse_args(argv)
    parts = []
    for version in arguments.triton or [None]:
        with tempfile.TemporaryDirectory() as folder:
            if version is not None:
                install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
                subprocess.run([*install, f"triton=={version}"], check=True)
            found = compiled(Path(folder) if version is not None else None)
        spilled = f"{sum(kernel['stack_bytes'] for kernel in found):,} bytes are spilled"
        parts.append("\n".join([f"Triton {version or 'as installed'}, {spilled}:", "", *as_markdown(table(found))]))
    text = "\n\n".join(parts) + "\n"
    print(text)
    if arguments.markdown:
        write_between(arguments.markdown, "compiled", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
