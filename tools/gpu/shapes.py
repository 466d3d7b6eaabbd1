"""The launches of kernels in shapes that models have: those of which `tools.gpu.kernels` has a table."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from unittest.mock import patch

import torch

from oaiserve.engine.decoder.description import Norm, RotaryTable
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.attention import FP8, LayerCache, Rotation, ScaledCache, Scoring
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.layer_operations import ACTIVATIONS
from oaiserve.engine.model.sampling.sampled_ids import BitMasks, DeviceEdits, Penalties
from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.plugins.cuda.executor import (
    triton_adapters,
    triton_latent,
    triton_layers,
    triton_products,
    triton_sampling,
    triton_states,
)
from oaiserve.plugins.cuda.executor import triton_attention as attention
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices, Kind, PackedMatrix, new_rounded
from oaiserve.plugins.cuda.executor.product_ways import ProductWays
from oaiserve.plugins.cuda.start.trials import EXPERT_TILES, TILES
from tests.engine.model.steps import CPU, sequence_of
from tools.gpu.compiling import HOPPER, SHARED_BYTES, is_amd
from tools.gpu.fake_device import noted_kernels
from tools.gpu.launches import Variant

HAS_FLOAT8 = 89  # the first compute capability with floats of eight bits; the start refuses them on others, and on AMD
UNFIT_ON_AMD = "heads of 512, float32"  # Plain torch computes these there.


def attend(
    dim: int,
    *,
    num_decodes: int = 64,
    query_len: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
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
    if is_scaled:
        cache = ScaledCache.of(LayerCache(*(blocks.to(FP8) for blocks in cache)), (0.5, 2.0))
    rotation = None
    if is_rotated or has_norms:
        table = torch.empty(4096, dim // 2) if is_rotated else None
        norm = torch.empty(dim) if has_norms else None
        rotation = Rotation(batch.positions, table, table, dim // 2, norm, norm, 1e-6)
    new_keys = key if has_keys else None
    attention.TritonAttention(batch)(query, new_keys, new_keys, cache, Scoring(0.1, **scoring), rotation)


def attend_latent(heads: int, rank: int = 512, shared: int = 64) -> None:
    """Compute a layer's attention to latent vectors for decodes and a prompt, with blocks of 16."""
    step = Step([Chunk(sequence_of([0] * 4096, range(256)), 4096 - count, count) for count in [1] * 64 + [2048]])
    batch = build_batch(step, 16, CPU)
    query = torch.empty(64 + 2048, heads, 128 + shared, dtype=torch.bfloat16)
    new = torch.empty(64 + 2048, rank + shared, dtype=torch.bfloat16)
    cache = torch.empty(2, 16, 1, rank + shared, dtype=torch.bfloat16)
    numbers = torch.empty(4096, shared // 2)
    table = RotaryTable(numbers, numbers, True, shared // 2)
    backend = triton_latent.TritonLatentAttention(batch)
    latent, last = new.split([rank, shared], dim=1)
    angles = batch.positions, table.cosines, table.sines
    absorbed = backend.write(query, latent.contiguous(), last, cache, table, lambda _: angles)
    backend.attend(absorbed, cache, rank, Scoring(0.1))


def adapt(dtype: torch.dtype) -> None:
    """Add an adapter to the product of a layer, for a prompt."""
    part = AdapterPart(torch.empty(16, 4096, dtype=dtype), torch.empty(14336, 16, dtype=dtype), 1.0)
    batch = build_batch(Step([Chunk(sequence_of([0] * 100, range(7)), 0, 100)]), 16, CPU)
    batch.adapters = [Adapter("a", {"up": part})]
    x = torch.empty(100, 4096, dtype=dtype)
    out = torch.empty(100, 14336, dtype=dtype)
    triton_adapters.TritonAdapters(["up"], 512, CPU).of_batch(batch)("up", x, out)


def norm(width: int) -> None:
    """Compute sums and norms of rows, as layers of several families have them."""
    x = torch.empty(64, width, dtype=torch.bfloat16)
    rms = Norm(torch.empty(width), None, 1e-5, False)
    mean = Norm(torch.empty(width), torch.empty(width), 1e-5, True)
    triton_layers.add_and_norm(x, (), None, rms)
    triton_layers.add_and_norm(x, (x,), None, rms)
    triton_layers.add_and_norm(x, (x,), rms, rms)
    triton_layers.add_and_norm(x, (x, x), None, mean, 0.5)


def activate(inner: int) -> None:
    products = torch.empty(64, 2 * inner, dtype=torch.bfloat16)
    for activation in ACTIVATIONS:
        triton_layers.activate(products, activation, is_gated=activation != "relu2")


def round_results(width: int, group: int) -> None:
    """Compute norms and activations that are rounded for the next product."""
    x = torch.empty(64, width, dtype=torch.bfloat16)
    rounded = new_rounded(64, width, group, CPU)
    triton_layers.add_and_norm(x, (x,), None, Norm(torch.empty(width), None, 1e-5, False), 1.0, rounded)
    if group:
        triton_layers.activate(torch.cat([x, x], dim=1), "silu", is_gated=True, rounded=rounded)


def packed(kind: Kind, columns: int, n: int, *, has_zeros: bool = True, group: int = 128) -> PackedMatrix:
    """Return a matrix whose groups of columns have scales, and zeros if they have four bits."""
    codes = torch.empty(n, columns // 2 if kind == "int4" else columns, dtype=torch.uint8)
    scales = torch.empty(columns // group, n, dtype=torch.float16)
    if kind == "float8":
        return PackedMatrix(kind, codes.view(FP8), scales.float(), None)
    zeros = torch.empty(columns // group, n, dtype=torch.uint8) if kind == "int4" and has_zeros else None
    return PackedMatrix(kind, codes, scales, zeros)


def multiply(rows: int, matrix: PackedMatrix) -> None:
    """Multiply rows with a packed matrix, and unpack it, as a step of many rows does."""
    triton_products.multiply(torch.empty(rows, 4096, dtype=torch.bfloat16), matrix, None)
    if rows == 1:
        triton_products.unpacked(matrix, torch.bfloat16)


def try_tiles(matrix: PackedMatrix) -> None:
    """Multiply with all tiles that a start tries."""
    for (rows, *_), candidates in TILES.items():
        for tiles in candidates:
            x = torch.empty(rows, 4096, dtype=torch.bfloat16)
            triton_products.multiply(x, matrix, None, ProductWays(None, tiles=(tiles,)))


def try_expert_tiles(kind: Kind) -> None:
    """Multiply with all tiles that a start tries for experts."""
    matrices = expert_matrices(kind, 8, 2048, 2048)
    for (rows,), candidates in EXPERT_TILES.items():
        for tiles in candidates:
            plan = triton_products.planned(
                torch.zeros(8 * rows, dtype=torch.int64), 8, ProductWays(expert_tiles=(tiles,))
            )
            x = torch.empty(8 * rows, 2048, dtype=torch.bfloat16)
            triton_products.product(x, matrices, plan, pairs_of_row=1, factors=None)


def round_rows(width: int, group: int = 0) -> None:
    triton_products.rounded_rows(torch.empty(64, width, dtype=torch.bfloat16), group)


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
    order, tile_expert, tile_first, tile_end = torch.zeros(4, 8192, dtype=torch.int32)
    plan = triton_products.Plan(order, tile_expert, tile_first, tile_end, triton_products.LARGEST_OF_EXPERTS)
    triton_products.product(x, expert_matrices(kind, 8, 2048, 2048), plan, pairs_of_row=1, factors=weights)


def recur(heads: int, key_heads: int, key_dim: int, value_dim: int, *, has_rate: bool) -> None:
    """Compute a recurrence, as Qwen3-Next's and Mamba 2's."""
    of_heads = torch.empty(2, 5, heads)
    key = torch.empty(2, 5, key_heads, key_dim)
    value = torch.empty(2, 5, heads, value_dim)
    state = torch.empty(2, heads, key_dim, value_dim)
    triton_states.recurrence(state, of_heads, key, value, key, of_heads if has_rate else None)


def draw(rows: int, vocabulary: int) -> None:
    """Draw the ids of rows, as in a graph, and with masks, as outside of graphs."""
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16)
    seeds = torch.empty(rows, dtype=torch.int64)
    parameters = torch.empty(len(DRAW_COLUMNS), rows)
    counts = torch.empty(rows, vocabulary, dtype=torch.int16)
    penalties = Penalties(counts, torch.empty(rows, 3), seeds)
    words = torch.empty(rows, -(-vocabulary // 32), dtype=torch.int32)
    for edits in (DeviceEdits(penalties), DeviceEdits(penalties, BitMasks(words, seeds))):
        triton_sampling.draw(logits, parameters, seeds, (torch.empty_like(seeds), torch.empty_like(seeds)), edits)


def shapes() -> dict[str, Callable[[], None]]:
    """Return the launches by the name of the shape. Heads have a number of dimensions; a group shares a key head."""
    float16 = torch.float16
    ones = torch.ones(32)
    norms = {"is_rotated": True, "has_norms": True}
    return {
        "heads of 64, group 4": lambda: attend(64, is_rotated=True),
        "heads of 64, float16, window, softcap": lambda: attend(64, dtype=float16, sliding_window=512, softcap=30.0),
        "heads of 64, sinks": lambda: attend(64, sinks=ones),
        "heads of 64, group 71": lambda: attend(64, heads=71, kv_heads=1),
        "heads of 80, float32": lambda: attend(80, query_len=20, num_decodes=0, dtype=torch.float32),
        "heads of 96, group 1": lambda: attend(96, kv_heads=32, is_rotated=True),
        "heads of 128, group 4": lambda: attend(128, is_rotated=True),
        "heads of 128, group 4, short prompts": lambda: attend(128, query_len=12, num_decodes=0, is_rotated=True),
        "heads of 128, group 8, norms": lambda: attend(128, kv_heads=4, **norms),
        "heads of 128, group 32": lambda: attend(128, query_len=0, heads=64, kv_heads=2),
        "heads of 256, group 2, norms": lambda: attend(256, heads=16, **norms),
        "heads of 256, shared keys": lambda: attend(256, query_len=0, heads=8, kv_heads=1, has_keys=False),
        "heads of 512, group 8, norms": lambda: attend(512, heads=16, kv_heads=2, **norms),
        "heads of 512, float32": lambda: attend(512, query_len=20, dtype=torch.float32, heads=8, kv_heads=1),
        "heads of 64, cache in FP8": lambda: attend(64, is_scaled=True, is_rotated=True),
        "heads of 128, cache in FP8": lambda: attend(128, is_scaled=True, is_rotated=True),
        "heads of 256, cache in FP8": lambda: attend(256, heads=16, is_scaled=True, **norms),
        "heads of 512, cache in FP8": lambda: attend(512, heads=16, kv_heads=2, is_scaled=True, **norms),
        "latent vectors, 16 heads": lambda: attend_latent(16),
        "latent vectors, 20 heads": lambda: attend_latent(20),
        "latent vectors, 128 heads": lambda: attend_latent(128),
        "latent vectors of 256, 40 heads": lambda: attend_latent(40, 256, 32),
        "adapters": lambda: adapt(torch.bfloat16),
        "norms of 4,096": lambda: norm(4096),
        "norms of 16,384": lambda: norm(16_384),
        "activations of 14,336": lambda: activate(14_336),
        "4 bits with zeros, 1 row": lambda: multiply(1, packed("int4", 4096, 6144)),
        "4 bits with zeros, 200 rows": lambda: multiply(200, packed("int4", 4096, 6144)),
        "4 bits in groups of 32, 1 row": lambda: multiply(1, packed("int4", 4096, 6144, has_zeros=False, group=32)),
        "8 bits, 1 row": lambda: multiply(1, packed("int8", 4096, 6144)),
        "FP8, 1 row": lambda: multiply(1, packed("float8", 4096, 6144)),
        "FP8, 200 rows": lambda: multiply(200, packed("float8", 4096, 6144)),
        "4 bits with zeros, tiles to choose from": lambda: try_tiles(packed("int4", 4096, 6144)),
        "FP8, tiles to choose from": lambda: try_tiles(packed("float8", 4096, 6144)),
        "FP8, rows of 4,096": lambda: round_rows(4096),
        "FP8, results of 4,096": lambda: round_results(4096, 0),
        "FP8, results of 4,096 in groups": lambda: round_results(4096, 128),
        "FP8, rows of 12,288 in groups": lambda: round_rows(12_288, 128),
        "FP8, rows of 28,672": lambda: round_rows(28_672),
        "32 experts in MXFP4": lambda: compute_experts("mxfp4", 32, 2880, 2880),
        "128 experts": lambda: compute_experts("dense", 128, 2048, 768),
        "experts in MXFP4, tiles to choose from": lambda: try_expert_tiles("mxfp4"),
        "experts, tiles to choose from": lambda: try_expert_tiles("dense"),
        "experts in MXFP4, 8,192 rows": lambda: multiply_many_rows("mxfp4"),
        "experts in 4 bits, 8,192 rows": lambda: multiply_many_rows("int4"),
        "experts, 8,192 rows": lambda: multiply_many_rows("dense"),
        "recurrence of Qwen3-Next": lambda: recur(32, 16, 128, 128, has_rate=True),
        "recurrence of Mamba 2": lambda: recur(128, 1, 128, 64, has_rate=False),
        "recurrence of wide states": lambda: recur(24, 1, 256, 64, has_rate=False),
        "draws": lambda: draw(64, 128_256),
    }


def card(capability: int) -> attention.Card:
    if is_amd(capability):
        return attention.AMD
    shared_bytes = SHARED_BYTES[capability]
    return attention.Card(shared_bytes, shared_bytes + attention.RESERVED_BYTES, capability == HOPPER)


def launched(capability: int, names: Collection[str] = ()) -> dict[Variant, str]:
    """Return the variants that all shapes, or those with these names, launch on a card, each with the first shape that
    does."""
    found: dict[Variant, str] = {}
    for name, run in shapes().items():
        is_left_out = "FP8" in name and (capability < HAS_FLOAT8 or is_amd(capability))
        if (names and name not in names) or is_left_out or (is_amd(capability) and name == UNFIT_ON_AMD):
            continue
        with patch.object(attention, "card_of", lambda device: card(capability)), noted_kernels() as launches:
            run()
        for variant in launches.counts:
            found.setdefault(variant, name)
    return found
