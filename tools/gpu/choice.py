"""Estimates how long a first start on a GPU takes to choose the ways of products: python -m tools.gpu.choice

No GPU is needed. It compiles the kernels that a start tries, with an empty cache, and adds the CPU time that this takes
here to the time of all launches on an L4, the slowest of the cards in the docs: for each one, `TIMES_FLOOR` times as
long as its bytes and operations take at the rates that the card's maker publishes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from oaiserve.plugins.cuda.executor import triton_attention
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices, PackedMatrix
from oaiserve.plugins.cuda.executor.product_ways import UNMEASURED, ProductWays
from oaiserve.plugins.cuda.start import trials
from oaiserve.plugins.cuda.start.trials import FLUSHED_BYTES, RUNS, SLEEP_CYCLES, Trials, product_ways
from tools.gpu.compiling import NoDevice
from tools.gpu.fake_device import FAKE, noted_kernels
from tools.gpu.launches import Variant
from tools.gpu.shapes import card, expert_matrices, packed
from tools.markdown import as_markdown, number

L4 = 89
BYTES_PER_SECOND = 0.3e12
OPERATIONS_PER_SECOND = 121e12
CYCLES_PER_SECOND = 0.795e9  # the lowest that its maker publishes
# Before the runs of a product the device sleeps, and before each one it writes over its caches.
SECONDS_BETWEEN = SLEEP_CYCLES / CYCLES_PER_SECOND + RUNS * FLUSHED_BYTES / BYTES_PER_SECOND
TIMES_FLOOR = 6  # On an H100, products in few bits took up to 5.3 times as long as their bytes.
PLAIN_BYTES = 40  # bytes that plain torch reads and writes to expand a weight, in about ten operations
SHAPES_8B = ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096))  # columns, rows
ROWS = (1, 16, 64, 256, 1024, 2048)


def models() -> dict[str, list[PackedMatrix]]:
    """Return the matrices of a layer of some models, on a device without numbers."""
    found: dict[str, list[PackedMatrix]] = {
        "8B in FP8": [packed("float8", columns, n, group=columns) for columns, n in SHAPES_8B],
        "8B in 4 bits": [packed("int4", columns, n) for columns, n in SHAPES_8B],
        "gpt-oss 20B": [expert_matrices("mxfp4", 32, n, 2880) for n in (5760, 2880)],
        "Qwen3 30B A3B": [expert_matrices("dense", 128, *shape) for shape in ((1536, 2048), (2048, 768))],
    }
    return {name: [matrix.to(FAKE) for matrix in matrices] for name, matrices in found.items()}


@dataclass
class Clock:
    """Runs each product once, so that its kernels are noted, and adds up what its launches and comparison take."""

    launches: int = 0
    seconds: float = 0.0

    def __call__(self, run: Any) -> float:
        run()
        x, matrix, _, way = run.args
        floor = floor_seconds(x, matrix, way)
        self.launches += RUNS + 2
        self.seconds += (RUNS + 2) * TIMES_FLOOR * floor + SECONDS_BETWEEN
        self.seconds += PLAIN_BYTES * weights_of(matrix) / BYTES_PER_SECOND
        return floor


def weights_of(matrix: PackedMatrix) -> int:
    n, columns = matrix.shape
    return n * columns * (len(matrix.codes) if isinstance(matrix, ExpertMatrices) else 1)


def floor_seconds(x: torch.Tensor, matrix: PackedMatrix, way: ProductWays) -> float:
    """Return the time of a product's bytes, or of its operations if that is longer."""
    n, columns = matrix.shape
    num_bytes = matrix.nbytes + 2 * (x.nelement() + len(x) * n)
    if way.unpacks(len(x)):
        num_bytes += 4 * weights_of(matrix)
    return max(num_bytes / BYTES_PER_SECOND, 2 * len(x) * n * columns / OPERATIONS_PER_SECOND)


def estimated(matrices: list[PackedMatrix]) -> tuple[Clock, list[Variant], list[Variant]]:
    """Return the clock of a model's trials, the kernels that these compile, and those that a start needs anyway."""
    weights: Any = SimpleNamespace(packed=matrices, dtype=torch.bfloat16, device=FAKE)
    clock = Clock()
    with (
        patch.object(triton_attention, "card_of", lambda device: card(L4)),
        patch.object(trials, "refuse_wrong", lambda *_: None),  # There are no numbers to compare.
    ):
        with noted_kernels() as of_trials:
            product_ways(weights, clock)
        with noted_kernels() as of_start, torch.inference_mode():
            Trials(weights, Clock()).fastest({"": UNMEASURED}, matrices, ROWS)
    return clock, [*of_trials.counts], [*of_start.counts]


def compile_seconds(variants: Iterable[Variant]) -> list[float]:
    """Return the CPU time that it takes to compile each kernel, none of which has been compiled before."""
    from triton.runtime import driver

    driver.set_active(NoDevice(L4))
    taken = []
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        for variant in variants:
            began = sum(os.times()[:4])  # This process starts the assembler.
            variant.function().warmup(grid=(1,), **variant.launch_arguments())
            taken.append(sum(os.times()[:4]) - began)
    return taken


def row_of(name: str, matrices: list[PackedMatrix]) -> list[str]:
    """Return a row of the table: seconds, and in brackets the number of kernels or launches."""
    clock, of_trials, of_start = estimated(matrices)
    needed = compile_seconds(one for one in of_trials if one in of_start)
    others = compile_seconds(one for one in of_trials if one not in of_start)
    taken = [(sum(needed), len(needed)), (sum(others), len(others)), (clock.seconds, clock.launches)]
    return [
        name,
        *(f"{number(seconds)} ({number(count)})" for seconds, count in taken),
        number(sum(others) + clock.seconds),
    ]


def main() -> int:
    head = ["seconds, at most", "kernels that any start needs", "others", "launches on an L4", "both of these"]
    print("\n".join(as_markdown([head, *(row_of(*one) for one in models().items())])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
