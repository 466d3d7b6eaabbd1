"""Layers of attention without a model around them: their native code, their caches, and how they score keys."""

from typing import NamedTuple

import torch

from oaiserve.engine.decoder.spec import KVShape
from oaiserve.engine.model.attention import LayerCache, Scoring
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.library import Library
from tests.engine.model.steps import BLOCK_SIZE

NUM_BLOCKS = 48


class Layer(NamedTuple):
    heads: int
    shape: KVShape
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def scoring(self) -> Scoring:
        sinks = torch.linspace(0.06, 6.0, self.heads) if self.has_sinks else None
        return Scoring(0.2, self.sliding_window, self.softcap, sinks)


def native_attention(
    layers: list[Layer], dtype: torch.dtype, num_threads: int = 2, num_blocks: int = NUM_BLOCKS
) -> NativeAttention:
    """Return the native attention of these layers. What has not been written into its caches is NaN."""
    shapes = {index: layer.shape for index, layer in enumerate(layers)}
    sizes = {"num_threads": num_threads, "num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    native = NativeAttention(Library(dtype), shapes, dtype, **sizes)
    for cache in native.caches.values():
        for blocks in cache:
            blocks.fill_(torch.nan if blocks.is_floating_point() else -1)  # scales whose bytes are -1 are NaN
    return native


def plain_caches(layers: list[Layer], dtype: torch.dtype) -> dict[int, LayerCache]:
    """Return empty caches for the reference."""
    return {
        index: LayerCache(
            *(torch.zeros(NUM_BLOCKS, BLOCK_SIZE, s.kv_heads, dim, dtype=dtype) for dim in (s.key_dim, s.value_dim))
        )
        for index, (_, s, *_) in enumerate(layers)
    }
