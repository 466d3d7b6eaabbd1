"""Compiles variants of Triton's kernels for a GPU that is not there, in several processes, and tells what they take."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tools.gpu.launches import Variant

CAPABILITY = 90
SHARED_BYTES = 227 << 10  # the most shared memory of one program on such a card, as the device reports it
WARP_SIZE = 32
# Those that take longest are compiled first, so that no process ends long after the others.
_LONGEST = ("decode_kernel", "prefill_kernel", "product_kernel", "candidates_kernel", "cut_kernel")


class Resources(NamedTuple):
    """What one program of a compiled kernel takes, or why there is none."""

    registers: int = 0  # registers of each thread
    spilled_bytes: int = 0  # bytes of registers that each thread keeps in memory
    shared_bytes: int = 0
    problem: str = ""


class NoDevice:
    """Replaces Triton's driver, with the methods that compiling needs."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, WARP_SIZE)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(variants: Iterable[Variant], processes: int | None = None) -> Iterator[tuple[Variant, Resources]]:
    """Yield each variant with what it takes, as soon as it is known."""
    order = sorted(variants, key=lambda one: (one.kernel not in _LONGEST, one.kernel, one.arguments))
    context = multiprocessing.get_context("spawn")
    number = min(processes or os.cpu_count() or 1, max(1, len(order)))
    with ProcessPoolExecutor(number, mp_context=context, initializer=_without_device) as pool:
        running = {pool.submit(resources, variant): variant for variant in order}
        for done in as_completed(running):
            yield running[done], done.result()


def _without_device() -> None:
    from triton.runtime import driver

    driver.set_active(NoDevice())


def resources(variant: Variant) -> Resources:
    try:
        kernel = variant.function()
        found = kernel.warmup(grid=(1,), **variant.launch_arguments())
    except Exception as error:  # The compiler raises anything, and other variants are compiled, too.
        lines = str(error).strip().splitlines() or [""]
        return Resources(problem=f"cannot be compiled ({type(error).__name__}: {lines[-1]})")
    registers, spilled_bytes = _of_binary(found.asm["cubin"])
    shared_bytes = found.metadata.shared
    problem = ""
    if shared_bytes > SHARED_BYTES:
        problem = f"needs {shared_bytes:,} bytes of shared memory, and a program has at most {SHARED_BYTES:,}"
    return Resources(registers, spilled_bytes, shared_bytes, problem)


def _of_binary(binary: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of spilled registers of a compiled kernel."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [program, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", said)}
    return counts["REG"], counts["STACK"]
