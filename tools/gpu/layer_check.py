"""Checks the kernels of layers beside attention, and those of packed weights, against plain torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.attention import FP8, LayerCache, ScaledCache, Scoring
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.rotation import Rotation
from oaiserve.engine.model.cpu.description import Norm
from oaiserve.engine.model.gpu.device_matrices import PackedMatrix, expanded_product
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.gpu.products import ROUNDED_TOLERANCE
from oaiserve.engine.start.load import load_model
from tests.models.decoders import SMALL, generate, random_model
from tests.models.packed import Packing, write_checkpoint
from tools.gpu.target import Target
from tools.gpu.workload import running_engine

TOLERANCE = 2e-2  # relative to the norm of the result, in bfloat16
ROWS = (1, 7, 20, 50, 300)
PACKINGS = {
    "AWQ": Packing("awq"),
    "GPTQ, any order": Packing("gptq", has_act_order=True),
    "GPTQ, 8 bits": Packing("gptq", bits=8),
    "compressed-tensors": Packing("pack-quantized", is_symmetric=True),
}
PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12]
NUM_TOKENS = 12


def run(target: Target) -> Iterator[dict[str, Any]]:
    if find_spec("triton") is None:
        yield {"problem": "Triton is not installed: there are no kernels of ours."}
    else:
        yield {"operations": list(check_operations(target))}
        yield {"rotation": list(check_attention(target))}
        yield {"matrices": list(check_matrices(target))}
        yield {"products of 8 bits": list(check_scaled(target))}
        for name, packing in PACKINGS.items():
            yield {name: check_checkpoint(packing, target)}


def matrices(n: int, columns: int, device: torch.device) -> dict[str, PackedMatrix]:
    """Return random matrices of each kind, with groups of 128 columns."""
    groups = columns // 128
    codes = torch.randint(0, 256, (n, columns), dtype=torch.uint8, device=device)
    scales = torch.rand(groups, n, device=device) * 0.01 + 0.001
    zeros = torch.randint(0, 16, (groups, n), dtype=torch.uint8, device=device)
    half = codes[:, : columns // 2].contiguous()
    return {
        "4 bits": PackedMatrix("int4", half, scales.half(), None),
        "4 bits with zeros": PackedMatrix("int4", half, scales.half(), zeros),
        "8 bits": PackedMatrix("int8", codes, scales.half(), None),
        "FP8": PackedMatrix("float8", torch.randn(n, columns, device=device).to(FP8), scales, None),
    }


def compare(what: str, got: torch.Tensor, want: torch.Tensor, limit: float = TOLERANCE, **about: Any) -> dict[str, Any]:
    difference = float((got.float() - want.float()).norm() / want.float().norm())
    return {"what": what, **about, "difference": difference, "equal": difference < limit}


def in_rows(n: int, columns: int, device: torch.device) -> PackedMatrix:
    """Return a random matrix in FP8, of which each row has one scale."""
    codes, scales = torch.randn(n, columns, device=device), torch.rand(1, n, device=device) * 0.01 + 0.001
    return PackedMatrix("float8", codes.to(FP8), scales, None)


@torch.inference_mode()
def check_matrices(target: Target) -> Iterator[dict[str, Any]]:
    from oaiserve.engine.model.gpu.triton_matrices import multiply

    torch.manual_seed(0)
    n, columns = (70, 256) if target.quick else (6144, 4096)
    for name, matrix in matrices(n, columns, target.device).items():
        for rows in ROWS:
            x = torch.randn(rows, columns, dtype=torch.bfloat16, device=target.device)
            want = expanded_product(x, matrix, None)
            # Twice: a product leaves the counters of its programs as it finds them.
            for _ in range(2):
                found = compare(name, multiply(x, matrix, None), want, rows=rows)
            yield found


@torch.inference_mode()
def check_scaled(target: Target) -> Iterator[dict[str, Any]]:
    """Compare products of 8 bits, whose inputs are rounded: those of torch, where it has them, and ours."""
    from oaiserve.engine.model.gpu.triton_scaled import ways

    torch.manual_seed(0)
    n, columns = (64, 256) if target.quick else (6144, 4096)
    kinds = {"rows": in_rows(n, columns, target.device), "blocks": matrices(n, columns, target.device)["FP8"]}
    for name, matrix in kinds.items():
        for rows in (20, 70 if target.quick else 300):
            x = torch.randn(rows, columns, device=target.device).bfloat16()
            want = expanded_product(x, matrix, None)
            for way in ways(matrix):
                about = {"rows": rows, "way": way.__name__}
                try:
                    found = way(x, matrix, None)
                except (NotImplementedError, RuntimeError, ValueError) as error:
                    yield {"what": f"in 8 bits, {name}", **about, "left_out": str(error)[:200]}
                    continue
                yield compare(f"in 8 bits, {name}", found, want, ROUNDED_TOLERANCE, **about)


@torch.inference_mode()
def check_operations(target: Target) -> Iterator[dict[str, Any]]:
    from oaiserve.engine.model.gpu import triton_layers

    torch.manual_seed(0)
    width = 100 if target.quick else 5000
    weight, bias = torch.rand(2, width, device=target.device) + 0.5
    norms = {"none": None, "rms": Norm(weight, None, 1e-5, False), "mean": Norm(weight, bias, 1e-5, True)}
    for name, norm in norms.items():
        for number in (0, 1, 2):
            hidden, *added = torch.randn(1 + number, 33, width, device=target.device).bfloat16()
            ways = (layer_operations.add_and_norm, triton_layers.add_and_norm)
            want, got = (way(hidden.clone(), tuple(added), norms["rms"], norm, 0.5) for way in ways)
            yield compare(f"norm {name}, {number} added", torch.cat(got), torch.cat(want))
    products = torch.randn(33, 2 * width, device=target.device).bfloat16()
    for activation in layer_operations.ACTIVATIONS:
        operations = (layer_operations.activate, triton_layers.activate)
        want_one, got_one = (way(products, activation, is_gated=True) for way in operations)
        yield compare(activation, got_one, want_one)


@torch.inference_mode()
def check_attention(target: Target) -> Iterator[dict[str, Any]]:
    """Compare attention with queries and keys that are normed and rotated, and with a cache in eight bits."""
    from tools.gpu.kernel_check import backend, make_batch

    heads, kv_heads, dim, device = 8, 2, 64, target.device
    long = 100 if target.quick else 9000
    for is_scaled in (False, True):
        for is_interleaved in (False, True):
            for has_norms in (False, True):
                torch.manual_seed(1)
                batch = make_batch([(5, 1), (long, 1), (0, 20), (30, 9)], 16, device)
                sizes = (int(batch.block_tables.max()) + 1, 16, kv_heads, dim)
                content = torch.randn(2, *sizes, device=device).bfloat16()
                plain = LayerCache(*content)
                if is_scaled:
                    plain = ScaledCache.of(LayerCache(*(one.to(FP8) for one in content)), (0.5, 0.25))
                angles = torch.rand(long + 2, dim // 4, device=device) * 6
                norm = torch.rand(dim, device=device) + 0.5 if has_norms else None
                rotation = Rotation(batch.positions, angles.cos(), angles.sin(), is_interleaved, norm, norm, 1e-6)
                query, key, value = (
                    torch.randn(len(batch.input_ids), number, dim, device=device).bfloat16()
                    for number in (heads, kv_heads, kv_heads)
                )
                scoring = Scoring(0.125)
                want = ReferenceAttention(batch)(*rotation(query, key), value, plain.copy(), scoring)
                got = backend.TritonAttention(batch)(query, key, value, plain.copy(), scoring, rotation)
                about = {"eight_bits": is_scaled, "interleaved": is_interleaved, "norms": has_norms}
                yield compare("attention", got, want, **about)


def check_checkpoint(packing: Packing, target: Target) -> dict[str, Any]:
    """Compare the answers of a packed checkpoint, kept packed, with those of its weights, in float32."""
    sizes = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = random_model(LlamaConfig(**sizes))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), model, packing)
        expected = generate(model, PROMPTS, NUM_TOKENS)
        loaded = load_model(folder, device=target.device.type, dtype="float32")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    different = []
    for kv_cache_dtype in ("auto", "fp8") if target.is_gpu else ("auto",):
        asked = loaded.with_cache(kv_cache_dtype)  # type: ignore[arg-type]
        settings = {"block_size": 16, "kv_blocks": 64, "max_running": 8, "kv_cache_dtype": kv_cache_dtype}
        with running_engine(asked, **settings) as engine:
            found = [completion.token_ids for completion in engine.generate(PROMPTS, params)]
            features = dict(engine.features)
        if kv_cache_dtype == "auto" and found != expected:
            different.append(f"{found} and not {expected}")
        if target.is_gpu and not (features["packed_weights"] and features["fused_layers"]):
            different.append(f"not everything is on: {features}")
    return {"equal": not different, "different": different}
