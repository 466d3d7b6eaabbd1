"""Compiles the Triton kernels on a machine without a GPU, and prints their resources as JSON.

    triton_compile.py CAPABILITY    (such as 90, for an H100 or H200)

This runs in a process of its own, because Triton is in interpreter mode in the process of the tests.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from oaiserve.engine.decoder.description import Norm
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.attention import FP8, LayerCache, Rotation, ScaledCache, Scoring
from oaiserve.engine.model.attention import triton as backend
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.gpu import triton_adapters, triton_layers, triton_products, triton_states
from oaiserve.engine.model.gpu.device_matrices import ExpertMatrices, Kind, PackedMatrix
from oaiserve.engine.model.layer_operations import ACTIVATIONS
from oaiserve.engine.model.sampling import triton_sampling
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.steps import CPU, sequence_of

CAPABILITY = int(sys.argv[1])
# The memory that one program may share among its threads, as the device reports it.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}[CAPABILITY]
CARD = backend.Card(SHARED_BYTES, SHARED_BYTES + 1024, CAPABILITY == 90)
HAS_FLOAT8 = CAPABILITY >= 89  # else the start refuses caches and expands matrices in eight bits
# Whose instructions are looked at; others are not disassembled.
ON_TENSOR_CORES = {
    *("shrink_kernel", "expand_kernel", "product_kernel"),
    *("prefill_kernel", "decode_kernel"),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoDevice:
    """Replaces Triton's driver, with the methods that compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompileOnly:
    """Replaces a kernel, and compiles it when it would be launched."""

    def __init__(self, kernel: Any, found: list[dict[str, Any]]) -> None:
        self._kernel = kernel
        self._found = found

    def __getitem__(self, grid: tuple[int, ...]) -> CompileOnly:
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        name = self._kernel.fn.__name__
        compiled = self._kernel.warmup(*arguments, grid=(1,), **constants)
        code = dump(compiled.asm["cubin"], *["--dump-sass"] * (name in ON_TENSOR_CORES))
        self._found.append(
            {
                "kernel": name,
                "dtype": str(arguments[0].dtype),
                "constants": {name: value for name, value in constants.items() if not name.startswith("TILE")},
                "rows": constants.get("TILE_ROWS", 0),
                "registers": int(re.search(r"REG:(\d+)", code)[1]),
                "stack_bytes": int(re.search(r"STACK:(\d+)", code)[1]),  # spilled registers
                "shared_bytes": compiled.metadata.shared,
                "shared_limit": SHARED_BYTES,
                "at_once": counted_on(name, arguments, constants),
                "instructions": sorted(set(re.findall(r"\b(HGMMA|QGMMA|HMMA|LDGSTS|UTCHMMA)\b", code))),
            }
        )


def counted_on(name: str, arguments: tuple[Any, ...], constants: dict[str, Any]) -> list[int]:
    """Return how many programs of a kernel there may be on a multiprocessor; empty: the code does not count on them.

    Those of a cache in eight bits depend on registers, and so on the version of Triton."""
    if name != "decode_kernel" or constants["TILE_ROWS"] > 32:
        return []
    keys, values = arguments[6:8]
    number = backend.programs_per_sm(constants["GROUP"], LayerCache(keys, values), arguments[0].itemsize, CARD)
    return [number] if keys.itemsize > 1 else [number - 1, number, number + 1]


@functools.cache
def dump(binary: bytes, *flags: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", *flags, file.name], check=True, capture_output=True, text=True
        ).stdout


def attend(
    dim: int,
    *,
    num_decodes: int,
    query_len: int,
    dtype: torch.dtype,
    heads: int = 32,
    kv_heads: int = 8,
    is_rotated: bool = False,
    has_norms: bool = False,
    is_scaled: bool = False,
    has_keys: bool = True,
    **scoring: Any,
) -> None:
    """Compute a layer's attention for decodes and, if it has tokens, a prefill, with blocks of 16."""
    step = Step()
    for count in [1] * num_decodes + [query_len] * (query_len > 0):
        step.chunks.append(Chunk(sequence_of([0] * 4096, range(256)), 4096 - count, count))
    num_tokens = num_decodes + query_len
    cache = LayerCache(*torch.empty(2, 2, 16, kv_heads, dim, dtype=dtype))
    query, key = (torch.empty(num_tokens, number, dim, dtype=dtype) for number in (heads, kv_heads))
    batch = build_batch(step, 16, CPU)
    if is_scaled and not HAS_FLOAT8:
        return
    if is_scaled:
        cache = ScaledCache.of(LayerCache(*(blocks.to(FP8) for blocks in cache)), (0.5, 2.0))
    rotation = None
    if is_rotated or has_norms:
        table = torch.empty(4096, dim // 2) if is_rotated else None
        norm = torch.empty(dim) if has_norms else None
        rotation = Rotation(batch.positions, table, table, dim // 2, norm, norm, 1e-6)
    attention = backend.TritonAttention(batch)
    new_keys = key if has_keys else None
    attention(query, new_keys, new_keys, cache, Scoring(0.1, **scoring), rotation)


def adapt(dtype: torch.dtype) -> None:
    """Add an adapter to the product of a layer, for a prompt."""
    part = AdapterPart(torch.empty(16, 4096, dtype=dtype), torch.empty(14336, 16, dtype=dtype), 1.0)
    batch = build_batch(Step([Chunk(sequence_of([0] * 100, range(7)), 0, 100)]), 16, CPU)
    batch.adapters = [Adapter("a", {"up": part})]
    x = torch.empty(100, 4096, dtype=dtype)
    out = torch.empty(100, 14336, dtype=dtype)
    triton_adapters.TritonAdapters(["up"], 512, CPU).of_batch(batch)("up", x, out)


def operate(width: int, inner: int, rows: int) -> None:
    """Compute sums, norms and activations of rows, as layers of several families have them."""
    x = torch.empty(rows, width, dtype=torch.bfloat16)
    products = torch.empty(rows, 2 * inner, dtype=torch.bfloat16)
    rms = Norm(torch.empty(width), None, 1e-5, False)
    mean = Norm(torch.empty(width), torch.empty(width), 1e-5, True)
    triton_layers.add_and_norm(x, (), None, rms)
    triton_layers.add_and_norm(x, (x,), None, rms)
    triton_layers.add_and_norm(x, (x,), rms, rms)
    triton_layers.add_and_norm(x, (x, x), None, mean, 0.5)
    for activation in ACTIVATIONS:
        triton_layers.activate(products, activation, is_gated=activation != "relu2")


def multiply(columns: int, n: int, rows: int) -> None:
    """Multiply rows with packed matrices of each kind."""
    bytes_ = torch.empty(n, columns, dtype=torch.uint8)
    scales = torch.empty(columns // 128, n, dtype=torch.float16)
    zeros = torch.empty(columns // 128, n, dtype=torch.uint8)
    x = torch.empty(rows, columns, dtype=torch.bfloat16)
    matrices = (
        PackedMatrix("int4", bytes_[:, : columns // 2].contiguous(), scales, zeros),
        PackedMatrix("int4", bytes_[:, : columns // 2].contiguous(), scales.repeat(4, 1), None),  # groups of 32
        PackedMatrix("int8", bytes_, scales, None),
        PackedMatrix("float8", bytes_.view(FP8), scales.float(), None),
    )
    matrices = matrices if HAS_FLOAT8 else matrices[:-1]
    for matrix in matrices if rows == 1 else matrices[::3]:
        triton_products.multiply(x, matrix, None)
    for matrix in matrices if rows == 1 else ():
        triton_products.unpacked(matrix, torch.bfloat16)


def expert_matrices(kind: Kind, num_experts: int, n: int, columns: int) -> ExpertMatrices:
    """Return experts in 16 bits, or in 4 bits: in MXFP4 with biases, or in integers with zeros."""
    if kind == "dense":
        weights = torch.empty(num_experts, n, columns, dtype=torch.bfloat16)
        return ExpertMatrices(kind, weights, weights, None)
    codes = torch.empty(num_experts, n, columns // 2, dtype=torch.uint8)
    if kind == "mxfp4":
        scales = torch.empty(num_experts, columns // 32, n, dtype=torch.uint8)
        return ExpertMatrices(kind, codes, scales, None, bias=torch.empty(num_experts, n, dtype=torch.bfloat16))
    zeros = torch.empty(num_experts, columns // 128, n, dtype=torch.uint8)
    return ExpertMatrices(kind, codes, zeros.half(), zeros, None)


def compute_experts(kind: Kind, num_experts: int, width: int, inner: int) -> None:
    """Compute the experts of a decode, as gpt-oss's or Qwen3's."""
    x = torch.empty(1, width, dtype=torch.bfloat16)
    chosen = torch.empty(1, 4, dtype=torch.int64)
    plan = triton_products.planned(chosen, num_experts)
    both = triton_products.product(
        x, expert_matrices(kind, num_experts, 2 * inner, width), plan, pairs_of_row=4, factors=None
    )
    inner_rows = triton_layers.activate(both, "clamped", is_gated=True, alpha=1.702, limit=7.0)
    weights = torch.empty(1, 4, dtype=torch.bfloat16)
    down = expert_matrices(kind, num_experts, width, inner)
    triton_products.product(inner_rows, down, plan, pairs_of_row=1, factors=weights)


def multiply_many_rows(kind: Kind) -> None:
    """Multiply rows with their experts' matrices in the largest tiles, and with weights, which takes most registers."""
    x = torch.empty(8192, 2048, dtype=torch.bfloat16)
    weights = torch.empty(8192, dtype=torch.bfloat16)
    plan = triton_products.Plan(*torch.zeros(4, 8192, dtype=torch.int32), triton_products.LARGEST_OF_EXPERTS)
    triton_products.product(x, expert_matrices(kind, 8, 2048, 2048), plan, pairs_of_row=1, factors=weights)


def recur(heads: int, key_heads: int, key_dim: int, value_dim: int, *, has_rate: bool) -> None:
    """Compute a recurrence, as Qwen3-Next's and Mamba 2's."""
    of_heads = torch.empty(2, 5, heads)
    key = torch.empty(2, 5, key_heads, key_dim)
    value = torch.empty(2, 5, heads, value_dim)
    state = torch.empty(2, heads, key_dim, value_dim)
    triton_states.recurrence(state, of_heads, key, value, key, of_heads if has_rate else None)


def main() -> None:
    driver.set_active(NoDevice())
    backend.card_of = lambda device: CARD
    found: list[dict[str, Any]] = []
    of_layers = triton_adapters, triton_layers, triton_products, triton_states
    for module in (backend, triton_sampling, *of_layers):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, CompileOnly(getattr(module, name), found))
    backend.num_multiprocessors = triton_products.num_multiprocessors = lambda device: 132
    attend(64, num_decodes=64, query_len=2048, dtype=torch.float16, sliding_window=512, softcap=30.0)
    attend(64, num_decodes=64, query_len=2048, dtype=torch.bfloat16, sinks=torch.ones(32))
    attend(128, num_decodes=2, query_len=2048, dtype=torch.bfloat16)
    attend(80, num_decodes=0, query_len=20, dtype=torch.float32)
    # Queries and keys that are rotated where they are read, and normed in the largest heads. Other layers do less.
    attend(128, num_decodes=64, query_len=2048, dtype=torch.bfloat16, is_rotated=True)
    attend(256, num_decodes=64, query_len=20, dtype=torch.bfloat16, is_rotated=True, has_norms=True, heads=16)
    attend(128, num_decodes=64, query_len=2048, dtype=torch.bfloat16, is_scaled=True, is_rotated=True)
    attend(64, num_decodes=64, query_len=0, dtype=torch.bfloat16, heads=71, kv_heads=1)  # many for one key
    attend(256, num_decodes=64, query_len=0, dtype=torch.bfloat16, heads=8, kv_heads=1, has_keys=False)
    attend(64, num_decodes=64, query_len=0, dtype=torch.bfloat16, is_scaled=True)
    attend(128, num_decodes=64, query_len=0, dtype=torch.bfloat16, heads=64, kv_heads=2)
    # The widest heads, of Gemma 4, and those of eight bits.
    for is_scaled in (False, True):
        attend(512, num_decodes=64, query_len=2048, dtype=torch.bfloat16, heads=16, kv_heads=2, is_scaled=is_scaled)
    attend(512, num_decodes=64, query_len=20, dtype=torch.float32, heads=16, kv_heads=2, has_norms=True)
    attend(256, num_decodes=64, query_len=2048, dtype=torch.bfloat16, heads=16, is_scaled=True)
    attend(64, num_decodes=0, query_len=2048, dtype=torch.bfloat16, is_scaled=True)
    adapt(torch.bfloat16)
    operate(4096, 14336, 64)
    for rows in (1, 200):  # the smallest and the largest tiles
        multiply(4096, 6144, rows)
    attend(256, num_decodes=0, query_len=2048, dtype=torch.bfloat16, heads=8, kv_heads=4)
    compute_experts("mxfp4", 32, 2880, 2880)
    compute_experts("dense", 128, 2048, 768)
    for kind in ("mxfp4", "int4", "dense"):
        multiply_many_rows(kind)
    recur(32, 16, 128, 128, has_rate=True)
    recur(128, 1, 128, 64, has_rate=False)
    recur(24, 1, 256, 64, has_rate=False)
    logits = torch.empty(64, 128256, dtype=torch.bfloat16)
    out = (torch.empty(64, dtype=torch.int64), torch.empty(64, dtype=torch.int64))  # as for captured steps
    triton_sampling.draw(logits, torch.empty(4, 64), torch.empty(64, dtype=torch.int64), out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
