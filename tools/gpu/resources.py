"""Compiles the kernels of all shapes with the Triton that is installed, and prints what they take as JSON.

    python -m tools.gpu.resources CAPABILITY [CAPABILITY ...]    (such as 90, for an H100)

`tools.gpu.kernels` runs it in processes of their own, because a process has one version of Triton.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton

from oaiserve.engine.executors.cuda import triton_attention as attention
from tools.gpu.compiling import HOPPER, SHARED_BYTES, Resources, compiled
from tools.gpu.launches import Variant
from tools.gpu.shapes import card, launched

REGISTERS = 65_536  # registers of a multiprocessor
THREADS = 32  # threads of a warp
WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}  # most warps of a multiprocessor, by compute capability
_DEFAULT_WARPS = 4


def main(capabilities: list[int]) -> None:
    rows = []
    for capability in capabilities:
        shapes = launched(capability)
        found = dict(compiled(shapes, capability, disassembles=capability == HOPPER))
        rows += [row_of(name, variant, capability, found[variant]) for variant, name in shapes.items()]
    print(json.dumps({"triton": triton.__version__, "rows": rows}))


def row_of(shape: str, variant: Variant, capability: int, taken: Resources) -> dict[str, Any]:
    """Return a row of the results. It has a problem and instructions only if there are any."""
    arguments = json.loads(variant.arguments)
    row = {
        "shape": shape,
        "kernel": variant.kernel,
        "capability": capability,
        "registers": taken.registers,
        "spilled_bytes": taken.spilled_bytes,
        "shared_bytes": taken.shared_bytes,
        "programs": programs(taken, arguments.get("num_warps", _DEFAULT_WARPS), capability),
        "programs_counted": programs_counted(variant.kernel, arguments, capability),
        "instructions": taken.instructions,
        "is_in_16_bits": next(one[0] for one in arguments.values() if isinstance(one, list)).endswith("float16"),
        "problem": taken.problem,
    }
    if variant.kernel == "product_kernel":
        threads = THREADS * arguments["num_warps"]
        weights = arguments["TILE_N"] * arguments["TILE_COLUMNS"]
        row |= {"kind": arguments["KIND"], "rows": arguments["TILE_ROWS"]}
        row["instructions_per_weight"] = round(taken.in_loop * threads / weights, 2)
    return {name: one for name, one in row.items() if one not in ("", ())}


def programs(taken: Resources, num_warps: int, capability: int) -> int:
    """Return how many programs of a kernel a multiprocessor runs at once."""
    by_registers = REGISTERS // (-(-max(1, taken.registers) // 8) * 8 * num_warps * THREADS)
    sm_bytes = SHARED_BYTES[capability] + attention.RESERVED_BYTES
    by_memory = sm_bytes // (taken.shared_bytes + attention.RESERVED_BYTES)
    return min(by_registers, by_memory, WARPS[capability] // num_warps)


def programs_counted(kernel: str, arguments: dict[str, Any], capability: int) -> int:
    """Return on how many programs of a multiprocessor the plan of decodes counts, at least one.

    Tiles of many rows are for a few models, and one program is enough for them."""
    if kernel != "decode_kernel" or arguments["TILE_ROWS"] > 32:
        return 1
    itemsizes = [getattr(torch, arguments[name][0]).itemsize for name in ("query", "keys")]
    dims = attention.tile_dims(arguments["KEY_DIM"], arguments["VALUE_DIM"])
    return attention.programs_per_sm(arguments["GROUP"], dims, *itemsizes, card(capability))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
