"""Checks the Triton kernels of attention, layers, sampling and masks against the reference and plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from oaiserve.engine.decoder.description import Norm
from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.attention import FP8, LayerCache, ScaledCache, Scoring
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.rotation import Rotation
from oaiserve.engine.model.attention.triton import TritonAttention
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.gpu import triton_layers
from oaiserve.engine.model.sampling import numpy_sampling, triton_sampling
from oaiserve.engine.model.sampling.draw_rows import draw_row
from oaiserve.engine.model.sampling.logit_edits import apply_masks_in_torch
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.compare import difference
from tools.engine_load import random_step
from tools.gpu.sections import Target

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of each number of attention
LAYER_TOLERANCE = 2e-2  # relative to the norm of the result, in bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One layer's attention, for sequences by (tokens in the cache, new tokens), those with one new token first."""

    lengths: list[tuple[int, int]]
    heads: int = 8
    kv_heads: int = 2
    key_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None

    def batch(self, device: torch.device) -> Batch:
        return build_batch(random_step(self.lengths, self.block_size), self.block_size, device)

    def cache(self, batch: Batch) -> LayerCache:
        """Make a KV cache full of random numbers."""
        sizes = (int(batch.block_tables.max()) + 1, self.block_size, self.kv_heads)
        keys, values = (self._random(*sizes, dim, like=batch) for dim in (self.key_dim, self.value_dim))
        return LayerCache(keys, values)

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Make the query, key and value of a step; the first two are not contiguous, as in most models."""
        num_tokens = sum(batch.query_lens)
        query, key = (self._random(n, num_tokens, self.key_dim, like=batch) for n in (self.heads, self.kv_heads))
        value = self._random(num_tokens, self.kv_heads, self.value_dim, like=batch)
        return query.transpose(0, 1), key.transpose(0, 1), value

    def _random(self, *sizes: int, like: Batch) -> torch.Tensor:
        return torch.randn(*sizes, dtype=self.dtype, device=like.block_tables.device)


SHAPES: dict[str, dict[str, int]] = {
    "gpt2-124m": {"heads": 12, "kv_heads": 12, "key_dim": 64, "value_dim": 64},
    "llama-3.2-1b": {"heads": 32, "kv_heads": 8, "key_dim": 64, "value_dim": 64},
    "llama-3.1-8b": {"heads": 32, "kv_heads": 8},
    "gemma-2-9b": {"heads": 16, "kv_heads": 8, "key_dim": 256, "value_dim": 256},
}


@torch.inference_mode()
def run(target: Target) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    device = target.device
    yield {"triton": triton.__version__, "interpreted": not target.is_gpu}
    rows = []
    for case in attention_cases(target.quick):
        rows.append(check_attention(case, device))
        yield {"attention": rows}
    yield {"sampling": [check_sampling(spread, device, quick=target.quick) for spread in (0.1, 3.0, 20.0)]}
    vocabs = [300] if target.quick else [32_000, 49_152, 151_669, 262_144]
    yield {"masks": [check_masks(vocab, device) for vocab in vocabs]}


def attention_cases(quick: bool) -> list[Case]:
    mixed = [(0, 1), (500, 1), (3000, 1), (0, 1), (0, 17), (300, 200), (100, 700)]
    many = [(37 * i % 900, 1) for i in range(70)]
    long = [(20_000, 1), (9, 1)]
    if quick:
        mixed, many, long = [(5, 1), (70, 1), (30, 20)], [(3 * i, 1) for i in range(4)], [(300, 1)]
    return [
        *(
            Case(mixed, key_dim=dim, value_dim=dim, dtype=dtype)
            for dim, dtype in product([16, 64, 80, 96, 128, 256], [torch.bfloat16, torch.float16, torch.float32])
        ),
        *(Case(mixed, heads=heads, kv_heads=kv) for heads, kv in ((12, 12), (9, 3), (71, 1))),
        *(Case(mixed, block_size=size) for size in (8, 32, 256)),
        *(Case(mixed, window=window, softcap=cap) for window, cap in product((None, 100), (None, 5.0))),
        Case(mixed, value_dim=64),
        Case(mixed, key_dim=192),
        *(Case(lengths, **shape) for shape in SHAPES.values() for lengths in (many, long)),  # type: ignore[arg-type]
    ]


def check_attention(case: Case, device: torch.device) -> dict[str, Any]:
    batch = case.batch(device)
    cache, inputs = case.cache(batch), case.inputs(batch)
    scoring = Scoring(case.key_dim**-0.5, case.window, case.softcap)
    want, copies = attend_exactly(batch, inputs, cache, scoring)
    got = TritonAttention(batch)(*inputs, cache, scoring).float()
    is_written = all(torch.equal(a.float(), b) for a, b in zip(cache, copies, strict=True))
    tolerance = TOLERANCES[case.dtype]
    equal = is_written and bool(torch.isclose(got, want, rtol=tolerance, atol=tolerance).all())
    about = asdict(case) | {"dtype": str(case.dtype).removeprefix("torch."), "sequences": len(case.lengths)}
    del about["lengths"]
    return {**about, "difference": float((got - want).abs().max()), "equal": equal}


def attend_exactly(
    batch: Batch, inputs: tuple[torch.Tensor, ...], cache: LayerCache, scoring: Scoring
) -> tuple[torch.Tensor, LayerCache]:
    """Run the reference in float32 without torch's attention kernels for GPUs, which round in their own way. Return
    its result, and the KV cache with what it has written."""
    copies = LayerCache(cache.keys.float(), cache.values.float())
    with sdpa_kernel(SDPBackend.MATH):
        return ReferenceAttention(batch)(*(one.float() for one in inputs), copies, scoring), copies


def check_sampling(spread: float, device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Compare draws for rows of all kinds. A few rows may differ, where rounding decides which ids top_p keeps."""
    num_rows, vocab = (8, 300) if quick else (256, 128_256)
    logits = (torch.randn(num_rows, vocab, device=device) * spread).bfloat16()
    logits[0, 7], logits[1] = math.nan, -math.inf
    rows = []
    for row in range(num_rows):
        params = SamplingParams(
            temperature=(0.0, 0.6, 1.0)[row % 3],
            top_k=(0, 0, 40, 1)[row % 4],
            top_p=(1.0, 0.95, 1.0, 0.5, 0.9)[row % 5],
            min_p=(0.0, 0.05)[row % 7 == 0],
        )
        rows.append(draw_row(Sequence("r", 0, [1], params, max_len=2, draw_key=row), 1))
    token_ids, are_finite = triton_sampling.sample_ids(logits, rows)
    want_ids, want_finite = numpy_sampling.sample_ids(logits, rows)
    num_different = int(((token_ids != want_ids) & want_finite).sum())
    equal = bool((are_finite == want_finite).all()) and num_different <= num_rows // 64
    return {"spread": spread, "rows": num_rows, "vocab": vocab, "different": num_different, "equal": equal}


def check_masks(vocab: int, device: torch.device) -> dict[str, Any]:
    """Compare random masks of grammars, for every other row, with those of plain torch."""
    got = torch.randn(16, vocab, device=device)
    want, rows = got.clone(), list(range(0, 16, 2))
    words = np.random.default_rng(0).integers(0, 2**32, (len(rows), -(-vocab // 32)), dtype=np.uint32)
    triton_sampling.apply_masks(got, rows, words)
    apply_masks_in_torch(want, rows, words)
    return {"rows": len(rows), "vocab": vocab, "equal": torch.equal(got, want)}


def compared(
    what: str, got: torch.Tensor, want: torch.Tensor, limit: float = LAYER_TOLERANCE, **about: Any
) -> dict[str, Any]:
    apart = difference(got, want)
    return {"what": what, **about, "difference": apart, "equal": apart < limit}


@torch.inference_mode()
def check_operations(target: Target) -> Iterator[dict[str, Any]]:
    """Compare norms with what is added before them, and activations."""
    torch.manual_seed(0)
    width = 100 if target.quick else 5000
    weight, bias = torch.rand(2, width, device=target.device) + 0.5
    norms = {"none": None, "rms": Norm(weight, None, 1e-5, False), "mean": Norm(weight, bias, 1e-5, True)}
    for (name, norm), number in product(norms.items(), (0, 1, 2)):
        hidden, *added = torch.randn(1 + number, 33, width, device=target.device).bfloat16()
        want, got = (
            torch.cat(operations.add_and_norm(hidden.clone(), tuple(added), norms["rms"], norm, 0.5))
            for operations in (layer_operations, triton_layers)
        )
        yield compared(f"norm {name}, {number} added", got, want)
    products = torch.randn(33, 2 * width, device=target.device).bfloat16()
    for activation in layer_operations.ACTIVATIONS:
        want, got = (
            operations.activate(products, activation, is_gated=True) for operations in (layer_operations, triton_layers)
        )
        yield compared(activation, got, want)


@torch.inference_mode()
def check_rotation(target: Target) -> Iterator[dict[str, Any]]:
    """Compare attention with queries and keys that are normed and rotated, and with a cache in eight bits."""
    long, device, scoring = 100 if target.quick else 9000, target.device, Scoring(0.125)
    case = Case([(5, 1), (long, 1), (0, 20), (30, 9)], key_dim=64, value_dim=64)
    for is_scaled, is_interleaved, has_norms in product((False, True), repeat=3):
        torch.manual_seed(1)
        batch = case.batch(device)
        cache = case.cache(batch)
        if is_scaled:
            cache = ScaledCache.of(LayerCache(*(one.to(FP8) for one in cache)), (0.5, 0.25))
        angles = torch.rand(long + 2, case.key_dim // 4, device=device) * 6
        norm = torch.rand(case.key_dim, device=device) + 0.5 if has_norms else None
        apart = 1 if is_interleaved else case.key_dim // 4
        rotation = Rotation(batch.positions, angles.cos(), angles.sin(), apart, norm, norm, 1e-6)
        query, key, value = (one.contiguous() for one in case.inputs(batch))
        want = ReferenceAttention(batch)(*rotation(query, key), value, cache.copy(), scoring)
        got = TritonAttention(batch)(query, key, value, cache.copy(), scoring, rotation)
        about = {"eight_bits": is_scaled, "interleaved": is_interleaved, "norms": has_norms}
        yield compared("attention", got, want, **about)
