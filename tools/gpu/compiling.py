"""Compiles variants of Triton's kernels for a GPU that is not there, in several processes, and tells what they take."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from tools.gpu.launches import Variant

HOPPER = 90
MI300 = 942  # Cards of AMD have the number of their gfx as their capability.
# The most shared memory of one program on a card by its compute capability, as the device reports it.
SHARED_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
    MI300: 64 << 10,
}
LAUNCHES = "oaiserve.plugins.cuda.executor.launches"  # sets Triton's options when it is imported
# Those that take longest are compiled first, so that no process ends long after the others.
_LONGEST = ("decode_kernel", "prefill_kernel", "product_kernel", "candidates_kernel", "cut_kernel")


class Resources(NamedTuple):
    """What one program of a compiled kernel takes, or why there is none."""

    registers: int = 0  # registers of each thread
    spilled_bytes: int = 0  # bytes of registers that each thread keeps in memory
    shared_bytes: int = 0
    problem: str = ""
    instructions: tuple[str, ...] = ()  # those of INSTRUCTIONS, if the kernel was disassembled
    in_loop: int = 0  # instructions of a product's loop over columns, if the kernel was disassembled


# Kernels that multiply matrices, and the instructions for it on several cards; LDGSTS loads while others compute.
ON_TENSOR_CORES = ("shrink_kernel", "expand_kernel", "product_kernel", "prefill_kernel", "decode_kernel")
COUNTS = r"(REG|STACK):(\d+)"  # registers, and bytes of memory of each thread
COUNTS_ON_AMD = r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)"  # the same
PRODUCTS = r"\b(?:HGMMA|QGMMA|HMMA|UTCHMMA)\b"
INSTRUCTIONS = r"\b(HGMMA|QGMMA|HMMA|UTCHMMA|LDGSTS)\b"
ADDRESSED = r"/\*([0-9a-f]{4,})\*/\s+([^;/]*[A-Z][^;/]*);"  # the address of each instruction, and the instruction
BRANCH = r"\bBRA\b[^;]*?0x([0-9a-f]+)"


class NoDevice:
    """Replaces Triton's driver, with the methods that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        if is_amd(self._capability):
            return GPUTarget("hip", name_of(self._capability), threads_of_warp(self._capability))
        return GPUTarget("cuda", self._capability, threads_of_warp(self._capability))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def is_amd(capability: int) -> bool:
    return capability >= MI300


def threads_of_warp(capability: int) -> int:
    return 64 if is_amd(capability) else 32


def name_of(capability: int) -> str:
    return f"gfx{capability}" if is_amd(capability) else f"sm_{capability}"


def compiled(
    variants: Iterable[Variant],
    capability: int = HOPPER,
    processes: int | None = None,
    *,
    disassembled: Container[Variant] = (),
) -> Iterator[tuple[Variant, Resources]]:
    """Yield each variant with what it takes on a card, as soon as it is known.

    Disassembling a kernel takes half a second of CPU time, a third of what compiling it takes.

    The processes compile for this card alone: Triton keeps how the first card that it sees converts floats of 8 bits.
    They are forked from a process that has imported torch and Triton once for all cards.
    """
    order = sorted(variants, key=lambda one: (one.kernel not in _LONGEST, one.kernel, one.arguments))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([LAUNCHES, *{one.module for one in order}])
    number = min(processes or os.cpu_count() or 1, max(1, len(order)))
    with ProcessPoolExecutor(number, context, initializer=_as_on, initargs=(capability,)) as pool:
        running = {pool.submit(resources, variant, capability, variant in disassembled): variant for variant in order}
        for done in as_completed(running):
            yield running[done], done.result()


def end_with_parent() -> None:
    """End this process of a pool when the process that started it ends, even if that is killed. It would wait for work
    forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _as_on(capability: int) -> None:
    """Compile for a card, with Triton's options as a server sets them: the keys of its cache depend on them."""
    from triton.runtime import driver

    end_with_parent()
    driver.set_active(NoDevice(capability))
    importlib.import_module(LAUNCHES)


def resources(variant: Variant, capability: int, is_disassembled: bool) -> Resources:
    try:
        kernel = variant.function()
        found = kernel.warmup(grid=(1,), **variant.launch_arguments())
    except Exception as error:  # The compiler raises anything, and other variants are compiled, too.
        lines = str(error).strip().splitlines() or [""]
        return Resources(problem=f"cannot be compiled ({type(error).__name__}: {lines[-1]})")
    if is_amd(capability):
        counts = {name: int(count) for name, count in re.findall(COUNTS_ON_AMD, found.asm["amdgcn"])}
        taken = counts["vgpr_count"], counts["private_segment_fixed_size"], found.metadata.shared
        return Resources(*taken, problem=_too_large(found.metadata.shared, capability))
    counts = {name: int(count) for name, count in _matches(found, "--dump-resource-usage", COUNTS)}
    code = _matches(found, "--dump-sass", ADDRESSED) if is_disassembled else []
    names = {name for _, instruction in code for name in re.findall(INSTRUCTIONS, instruction)}
    shared_bytes = found.metadata.shared
    problem = _too_large(shared_bytes, capability)
    in_loop = instructions_in_loop(code) if variant.kernel == "product_kernel" else 0
    return Resources(counts["REG"], counts["STACK"], shared_bytes, problem, tuple(sorted(names)), in_loop)


def _too_large(shared_bytes: int, capability: int) -> str:
    most_bytes = SHARED_BYTES[capability]
    if shared_bytes <= most_bytes:
        return ""
    return f"needs {shared_bytes:,} bytes of shared memory, and a program has at most {most_bytes:,}"


def instructions_in_loop(code: Iterable[tuple[str, str]]) -> int:
    """Return the instructions of the shortest loop that multiplies matrices, or 0 if there is none."""
    rows = [(int(address, 16), instruction) for address, instruction in code]
    lengths = []
    for end, instruction in rows:
        branch = re.search(BRANCH, instruction)
        if branch is not None and int(branch[1], 16) < end:
            body = [one for address, one in rows if int(branch[1], 16) <= address <= end]
            if any(re.search(PRODUCTS, one) for one in body):
                lengths.append(len(body))
    return min(lengths, default=0)


def _matches(compiled_kernel: Any, what: str, pattern: str) -> list[Any]:
    """Return the matches of a pattern in a dump of a kernel.

    Triton's cache stores them next to the kernel, because the program that dumps it takes longer than reading both.
    """
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(compiled_kernel.hash)
    name = f"matches-{hashlib.sha256(f'{what} {pattern}'.encode()).hexdigest()[:8]}.json"
    path = cache.get_file(name)
    if path is None:
        dump = _dumped(compiled_kernel.asm["cubin"], what)
        path = cache.put(json.dumps(re.findall(pattern, dump)), name, binary=False)
    matches: list[Any] = json.loads(Path(path).read_text())
    return matches


def _dumped(binary: bytes, what: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([program, what, file.name], check=True, capture_output=True, text=True).stdout
