"""Compiles the kernels of all shapes with the Triton that is installed, and prints what they take as lines of JSON.

    python -m tools.gpu.resources '{"90": [SHAPE, ...], ...}'    (90 is an H100; no shapes are all)

`tools.gpu.kernels` runs it in processes of their own, because a process has one version of Triton.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from oaiserve.plugins.cuda.executor import triton_attention as attention
from tools.gpu import kernels
from tools.gpu.compiling import HOPPER, MI300, ON_TENSOR_CORES, Resources, compiled, is_amd, threads_of_warp
from tools.gpu.launches import Variant
from tools.gpu.shapes import card, launched

REGISTERS = 65_536  # registers of a multiprocessor
REGISTERS_OF_AMD = 131_072
# The most warps of a multiprocessor, by compute capability.
WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48, MI300: 32}
_DEFAULT_WARPS = 4


def main(wanted: Mapping[str, Sequence[str]]) -> None:
    """Compile the shapes with these names for the cards with these capabilities, and print a line for each card."""
    for capability, names in [(int(number), names) for number, names in wanted.items()]:
        rows = []
        shapes = launched(capability, names)
        disassembled = {variant for variant in shapes if has_bound_of_instructions(variant, capability)}
        found = dict(compiled(shapes, capability, disassembled=disassembled))
        for variant, name in shapes.items():
            row = row_of(name, variant, capability, found[variant])
            rows.append(row | of_product(variant, found[variant], capability, has_loop=variant in disassembled))
        print(json.dumps({"triton": triton.__version__, "rows": rows}), flush=True)


def has_bound_of_instructions(variant: Variant, capability: int) -> bool:
    """Return whether `kernels.beyond` looks at the instructions of a kernel on a card."""
    if capability == HOPPER:
        return variant.kernel in ON_TENSOR_CORES
    if variant.kernel != "product_kernel" or capability not in kernels.CARDS or is_amd(capability):
        return False
    arguments = json.loads(variant.arguments)
    return arguments["KIND"] in kernels.MOST_INSTRUCTIONS and arguments["TILE_ROWS"] == kernels.FEW_ROWS


def of_product(variant: Variant, taken: Resources, capability: int, *, has_loop: bool) -> dict[str, Any]:
    """Return more numbers of a product's row, with the instructions of its loop if it was disassembled."""
    if variant.kernel != "product_kernel" or is_amd(capability):
        return {}
    arguments = json.loads(variant.arguments)
    more = {"kind": arguments["KIND"], "rows": arguments["TILE_ROWS"]}
    if has_loop:
        threads = threads_of_warp(capability) * arguments["num_warps"]
        weights = arguments["TILE_N"] * arguments["TILE_COLUMNS"]
        more["instructions_per_weight"] = round(taken.in_loop * threads / weights, 2)
    return more


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
    return {name: one for name, one in row.items() if one not in ("", ())}


def programs(taken: Resources, num_warps: int, capability: int) -> int:
    """Return how many programs of a kernel a multiprocessor runs at once."""
    registers = REGISTERS_OF_AMD if is_amd(capability) else REGISTERS
    by_registers = registers // (-(-max(1, taken.registers) // 8) * 8 * num_warps * threads_of_warp(capability))
    by_memory = card(capability).sm_bytes // (taken.shared_bytes + attention.RESERVED_BYTES)
    return min(by_registers, max(1, by_memory), WARPS[capability] // num_warps)


def programs_counted(kernel: str, arguments: dict[str, Any], capability: int) -> int:
    """Return on how many programs of a multiprocessor the plan of decodes counts, at least one.

    Tiles of many rows are for a few models, and one program is enough for them."""
    if kernel != "decode_kernel" or arguments["TILE_ROWS"] > 32:
        return 1
    itemsizes = [getattr(torch, arguments[name][0]).itemsize for name in ("query", "keys")]
    dims = attention.tile_dims(arguments["KEY_DIM"], arguments["VALUE_DIM"])
    return attention.programs_per_sm(arguments["GROUP"], dims, *itemsizes, card(capability))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
