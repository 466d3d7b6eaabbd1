"""Computes the floor of a step: the bytes that it must read from memory and its floating-point operations, at the rates
that the machine reaches at most, which some seconds measure.

Weights are read once in a step, keys and values once for each sequence. Activations stay in the CPU's caches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from oaiserve.engine.decoder.spec import ModelSpec

READ_BYTES = 2**30  # far more than any cache holds
# Rows, inner size and columns. One matrix stays in the caches, which suits torch's library best.
GEMMS = ((256, 576, 1536), (2048, 576, 1536), (1024, 1024, 1024))


class Ceilings(NamedTuple):
    bytes_per_second: float
    flops_per_second: float


@torch.inference_mode()
def measure_ceilings(dtype: torch.dtype, num_threads: int) -> Ceilings:
    """Measure with this number of threads for about seven seconds. Leaves torch with one thread.

    A product of `dtype` may be one of float32: where the CPU has no instruction for bfloat16, torch's product of it has
    a tenth of the speed that floats have.
    """
    torch.set_num_threads(num_threads)
    memory = torch.ones(READ_BYTES // 4)
    bytes_per_second = READ_BYTES / _best_seconds(memory.amax)
    flops_per_second = 0.0
    for (rows, inner, columns), kind in itertools.product(GEMMS, {dtype, torch.float32}):
        x = torch.randn(rows, inner, dtype=kind)
        weight = torch.randn(columns, inner, dtype=kind)
        took = _best_seconds(partial(torch.nn.functional.linear, x, weight))
        flops_per_second = max(flops_per_second, 2 * rows * inner * columns / took)
    torch.set_num_threads(1)
    return Ceilings(bytes_per_second, flops_per_second)


def _best_seconds(call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    give_up = time.perf_counter() + 1.0
    while time.perf_counter() < give_up:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder with a gated MLP, in elements unless they say bytes."""

    layers: int
    hidden: int
    queries: int  # numbers of all heads together
    keys: int  # numbers of all KV heads together, as wide as the values
    intermediate: int
    vocab: int
    element_bytes: int  # size of a computed number
    cached_bytes: int  # size of a token in the cache, in all layers
    weight_bytes: float  # size of a number in the matrices, on average

    @classmethod
    def of(cls, spec: ModelSpec, config: PreTrainedConfig, weight_bytes: float | None = None) -> DecoderShape:
        kv = spec.kv_shapes[0]
        return cls(
            layers=len(spec.kv_shapes),
            hidden=config.hidden_size,
            queries=config.num_attention_heads * kv.key_dim,
            keys=kv.kv_heads * kv.key_dim,
            intermediate=config.intermediate_size,
            vocab=spec.vocab_size,
            element_bytes=spec.dtype.itemsize,
            cached_bytes=spec.kv_bytes_per_token,
            weight_bytes=spec.dtype.itemsize if weight_bytes is None else weight_bytes,
        )


class Work(NamedTuple):
    num_bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.num_bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


def work(shape: DecoderShape, chunks: Sequence[tuple[int, int]]) -> dict[str, Work]:
    """Return the work by operation, in order. A chunk is a sequence's tokens from `start` to before `end`; the last one
    samples."""
    tokens = sum(end - start for start, end in chunks)
    cached = sum(end for _, end in chunks)
    # Pairs of a query and a key that it sees.
    pairs = sum((start + 1 + end) * (end - start) / 2 for start, end in chunks)

    def linear(rows: int, columns: int, width: int, times: int = 1) -> Work:
        return Work(times * columns * width * shape.weight_bytes, 2.0 * times * rows * columns * width)

    layers = shape.layers
    hidden = shape.hidden
    nothing = Work(0, 0)
    return {
        "embed": Work(tokens * hidden * shape.element_bytes, 0),
        "norm": nothing,
        "qkv": linear(tokens, shape.queries + 2 * shape.keys, hidden, layers),
        "rotary": nothing,
        "attention": Work(float(cached * shape.cached_bytes), 4.0 * layers * pairs * shape.queries),
        "output": linear(tokens, hidden, shape.queries, layers),
        "gate and up": linear(tokens, 2 * shape.intermediate, hidden, layers),
        "down": linear(tokens, hidden, shape.intermediate, layers),
        "logits": linear(len(chunks), shape.vocab, hidden),
    }


def step_work(shape: DecoderShape, chunks: Sequence[tuple[int, int]]) -> Work:
    """Add up the work of a step. Its floor is less than the sum over operations, as reading and computing overlap."""
    return Work(*(sum(parts) for parts in zip(*work(shape, chunks).values(), strict=True)))
