"""Computes what a step must do at least: bytes to read from memory, and floating-point operations. Pure.

Weights are read once in a step, keys and values once for each sequence. Activations stay in the CPU's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.bench.ceilings import Ceilings


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder with a gated MLP, in elements unless they say bytes."""

    layers: int
    hidden: int
    queries: int  # of all heads together
    keys: int  # of all KV heads together, as wide as the values
    intermediate: int
    vocab: int
    element_bytes: int  # of what is computed
    cached_bytes: int  # of a token in the cache, in all layers
    weight_bytes: int  # of matrices


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
    pairs = sum((start + 1 + end) * (end - start) / 2 for start, end in chunks)  # of a query and a key that it sees

    def linear(rows: int, columns: int, width: int, times: int = 1) -> Work:
        return Work(times * columns * width * shape.weight_bytes, 2.0 * times * rows * columns * width)

    layers, hidden = shape.layers, shape.hidden
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


def floor_seconds(works: dict[str, Work], ceilings: Ceilings) -> float:
    """Return the floor of the whole step if reading and computing overlap: less than the sum over its operations."""
    return Work(*(sum(parts) for parts in zip(*works.values(), strict=True))).seconds(ceilings)
